"""Tokens picked by a statistic of a whole optimiser step. NumPy in float64, never torch.

A mean, a quantile or a "largest k" over a micro-batch would make the loss depend on how the batch was cut. So the
statistic is taken once, after ``prepare`` and before the first micro-batch, over the loss tokens of all rows of the
update on all ranks, and the loss is handed its outcome, ``LossInputs.is_selected_N``. What must be handed in: for each
loss token the proximal log-probability and the advantage (covariances) or proximal and behaviour log-probabilities
(second moment): two numbers a token, in the order of the update's rows. Ties go by position in that order.

Shape letter: ``N`` loss tokens of the update.
"""

from __future__ import annotations

import numpy as np


def token_covariances(proximal_logprobs_N: np.ndarray, advantages_N: np.ndarray) -> np.ndarray:
    """``(log pi - mean log pi) (A - mean A)`` of each token: its share in what the update does to the entropy.

    Source: Cui et al. 2025, arXiv:2505.22617.

    Example:
        >>> token_covariances(np.array([-1.0, -3.0]), np.array([2.0, 0.0])).tolist()
        [1.0, 1.0]
    """
    logprobs_N, advantages_N = (np.asarray(values, np.float64) for values in (proximal_logprobs_N, advantages_N))
    if len(logprobs_N) == 0:
        return np.zeros(0)
    return np.asarray((logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean()))


def in_covariance_band(covariances_N: np.ndarray, *, low: float, high: float, fraction: float, seed: int) -> np.ndarray:
    """At most ``fraction`` of all tokens, drawn from those whose covariance lies in ``[low, high]`` (Clip-Cov).

    Args:
        covariances_N: Of :func:`token_covariances`.
        low: Least covariance.
        high: Largest covariance; beyond it are outliers.
        fraction: Share of the update's tokens, rounded to the nearest number of them.
        seed: Of the draw.

    Example:
        >>> in_covariance_band(np.array([0.0, 2.0, 9.0]), low=1.0, high=5.0, fraction=0.5, seed=0).tolist()
        [False, True, False]
    """
    candidates = np.flatnonzero((covariances_N >= low) & (covariances_N <= high))
    num_selected = min(len(candidates), round(fraction * len(covariances_N)))
    is_selected_N = np.zeros(len(covariances_N), dtype=bool)
    is_selected_N[np.random.default_rng(seed).permutation(candidates)[:num_selected]] = True
    return is_selected_N


def largest_covariance(covariances_N: np.ndarray, *, fraction: float) -> np.ndarray:
    """The ``fraction`` of all tokens with the largest covariance (KL-Cov), rounded to the nearest number of them.

    Example:
        >>> largest_covariance(np.array([0.0, 2.0, 9.0, 1.0]), fraction=0.25).tolist()
        [False, False, True, False]
    """
    is_selected_N = np.zeros(len(covariances_N), dtype=bool)
    largest_first = np.argsort(-np.asarray(covariances_N), kind="stable")
    is_selected_N[largest_first[: round(fraction * len(covariances_N))]] = True
    return is_selected_N


def beyond_second_moment(log_ratios_N: np.ndarray, *, limit: float) -> np.ndarray:
    """The fewest tokens without which the mean squared log-ratio of the rest is at most ``limit`` (M2PO).

    Source: Zheng et al. 2025, arXiv:2510.01161.

    Args:
        log_ratios_N: ``proximal - behaviour``.
        limit: Of the mean of squares; 0.04 in the paper.

    Example:
        >>> beyond_second_moment(np.array([0.1, 1.0, -0.1]), limit=0.04).tolist()
        [False, True, False]
    """
    squares_N = np.asarray(log_ratios_N, np.float64) ** 2
    smallest_first = np.argsort(squares_N, kind="stable")
    means_N = squares_N[smallest_first].cumsum() / np.arange(1, len(squares_N) + 1)
    is_selected_N = np.ones(len(squares_N), dtype=bool)
    # Means of ever more tokens in ascending order never fall, so the tokens kept are the first ones.
    is_selected_N[smallest_first[: int(np.searchsorted(means_N, limit, side="right"))]] = False
    return is_selected_N
