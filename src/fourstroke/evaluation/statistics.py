"""Estimates from scores: a mean with an interval clustered by task, and pass@k. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri, stdtrit

from fourstroke.errors import DataError
from fourstroke.types import Estimate

_CONFIDENCE = 0.95


def clustered_estimate(scores_by_task: Sequence[np.ndarray]) -> Estimate:
    """Mean over tasks of the task's mean score, with a 95 % interval for new tasks of the same kind.

    Samples of one task are no independent evidence, so the interval is Student's t over the tasks' means (Miller 2024,
    Adding Error Bars to Evals, arXiv:2411.00640). Each task weighs the same, however many samples it has.

    The interval is clipped to [0, 1] where every score lies there, since then the mean must too; a range seen only in
    the sample is no bound on the mean. Where all tasks have the same mean, the spread says nothing about the
    uncertainty, and the interval is Wilson's (1927) for that mean on as many trials as there are tasks, for scores
    taken to range over [0, 1], stretched to reach the mean.

    Args:
        scores_by_task: float [n_i] for each task, each with at least one score.

    Raises:
        DataError: Fewer than two tasks, a task without a score, or a score that is not finite.

    Example:
        >>> estimate = clustered_estimate([np.array([1.0, 0.0]), np.array([1.0, 1.0]), np.array([0.0, 0.0])])
        >>> estimate.mean, estimate.num_tasks, estimate.num_samples
        (0.5, 3, 6)
    """
    num_tasks = len(scores_by_task)
    if num_tasks < 2:
        raise DataError(f"an interval clustered by task needs two scored tasks or more, got {num_tasks}")
    lengths = np.array([len(scores) for scores in scores_by_task])
    if not lengths.all():
        raise DataError(f"task at position {int(np.argmin(lengths))} has no score; leave it out and count it")
    scores = np.concatenate(scores_by_task).astype(np.float64)
    if not np.isfinite(scores).all():
        raise DataError("a score is not finite; such an episode must be unscored")
    means = np.add.reduceat(scores, np.cumsum(lengths) - lengths) / lengths
    if np.all(means == means[0]):
        mean = float(means[0])
        low, high = _wilson(mean, num_tasks)
    else:
        mean = float(means.mean())
        half = float(stdtrit(num_tasks - 1, 0.5 + _CONFIDENCE / 2) * means.std(ddof=1) / math.sqrt(num_tasks))
        low, high = mean - half, mean + half
    if scores.min() >= 0 and scores.max() <= 1:
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(mean=mean, low=low, high=high, num_tasks=num_tasks, num_samples=len(scores))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k), in whole numbers.

    Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv:2107.03374, equation 1. ``num_samples``
    counts rollouts of one task, never training rows.

    Raises:
        DataError: k is below 1 or above ``num_samples``, or ``num_correct`` is outside 0..``num_samples``.

    Example:
        >>> pass_at_k(8, 1, 8), round(pass_at_k(8, 2, 4), 6)
        (1.0, 0.785714)
    """
    if not 1 <= k <= num_samples:
        raise DataError(f"pass@{k} needs 1 <= k <= n, and there are n = {num_samples} samples")
    if not 0 <= num_correct <= num_samples:
        raise DataError(f"{num_correct} correct of {num_samples} samples is impossible")
    total = math.comb(num_samples, k)
    return (total - math.comb(num_samples - num_correct, k)) / total


def _wilson(mean: float, num_trials: int) -> tuple[float, float]:
    """Wilson's score interval for a mean of scores in [min(0, mean), max(1, mean)]."""
    bottom, top = min(0.0, mean), max(1.0, mean)
    share = (mean - bottom) / (top - bottom)
    z = float(ndtri(0.5 + _CONFIDENCE / 2))
    centre = (share + z**2 / (2 * num_trials)) / (1 + z**2 / num_trials)
    half = z * math.sqrt(share * (1 - share) / num_trials + z**2 / (4 * num_trials**2)) / (1 + z**2 / num_trials)
    # At a share of 0 or 1 one end is that share exactly; rounding must not move it past the mean.
    low, high = min(centre - half, share), max(centre + half, share)
    return bottom + low * (top - bottom), bottom + high * (top - bottom)
