"""Advantages from the scores of a group. NumPy in float64, never torch: they are scalars on the controller.

Only scored members come in: a member whose grader failed has no number, so it is neither trained on nor in a baseline.
Shape letter: ``G`` members of one group.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def is_uniform(scores_G: np.ndarray) -> bool:
    """Whether all scores are exactly equal, so that the group says nothing about what to prefer.

    Decided by equality and not by a computed deviation, which rounding can make slightly larger than zero.

    Example:
        >>> is_uniform(np.array([0.7, 0.7, 0.7])), is_uniform(np.array([1.0, 0.0]))
        (True, False)
    """
    return bool(np.all(scores_G == scores_G[:1]))


def group_standardised(scores_G: np.ndarray) -> np.ndarray:
    """``(score - mean) / std`` with the population deviation (divided by G) and no epsilon.

    The scores are first moved to the range 0 to 1, which changes nothing in exact arithmetic: the deviation of such
    numbers is at least ``1 / sqrt(2 G)``, so that nearly equal or very large scores can neither blow up nor overflow.
    No advantage is larger than ``sqrt(G - 1)``.

    Source: GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2. The paper leaves the kind of deviation open.

    Args:
        scores_G: float64 [G], finite; the scored members only.

    Returns:
        float64 [G]; exact zeros where all scores are equal, a lone member's included.

    Example:
        >>> group_standardised(np.array([1.0, 0.0, 0.0])).round(6).tolist()
        [1.414214, -0.707107, -0.707107]
    """
    if is_uniform(scores_G):
        return np.zeros(len(scores_G))
    # A power of two, so that nothing is rounded, and the subtraction below can neither overflow nor underflow.
    scaled_G = np.ldexp(scores_G, -np.frexp(np.abs(scores_G).max())[1])
    unit_G = (scaled_G - scaled_G.min()) / (scaled_G.max() - scaled_G.min())
    centred_G = unit_G - unit_G.mean()
    return np.asarray(centred_G / np.sqrt(np.mean(centred_G**2)))


def group_centred(scores_G: np.ndarray) -> np.ndarray:
    """``score - mean``: without the deviation, which favours questions that are nearly always or never solved.

    Source: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2.

    Args:
        scores_G: float64 [G], finite; the scored members only.

    Returns:
        float64 [G]; exact zeros where all scores are equal, a lone member's included.

    Example:
        >>> group_centred(np.array([1.0, 1.0, 0.0, 1.0])).tolist()
        [0.25, 0.25, -0.75, 0.25]
    """
    if is_uniform(scores_G):
        return np.zeros(len(scores_G))
    return np.asarray(scores_G - scores_G.mean())


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "group_standardised": group_standardised,
    "group_centred": group_centred,
}


def group_advantages(scores_G: np.ndarray, *, kind: str) -> np.ndarray:
    """Advantages of one group by the name in ``algorithm.advantage``.

    Args:
        scores_G: [G], finite; the scored members only.
        kind: A key of :data:`ADVANTAGES`.

    Returns:
        float64 [G].

    Example:
        >>> group_advantages(np.array([1.0, 0.0]), kind="group_centred").tolist()
        [0.5, -0.5]
    """
    scores_G = np.asarray(scores_G, dtype=np.float64)
    assert scores_G.ndim == 1, scores_G.shape
    assert np.all(np.isfinite(scores_G)), scores_G
    return ADVANTAGES[kind](scores_G)
