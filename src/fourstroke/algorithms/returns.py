"""Advantages that differ from token to token: returns over the sampled tokens of a row. NumPy in float64, never torch.

Time counts sampled tokens. A tool's result is not a step and not an end: what comes after it reaches back over it
undiminished. Only what is picked by the mask is read, so nothing under the mask can matter.
Shape letters: ``T`` tokens of a row, ``N`` its sampled tokens, ``U`` its turns.
"""

from __future__ import annotations

import numpy as np


def reward_to_go(rewards_T: np.ndarray, mask_T: np.ndarray, *, discount: float) -> np.ndarray:
    """The discounted sum of the rewards at a token and after it.

    Args:
        rewards_T: Reward of each token; those under the mask are ignored.
        mask_T: bool, true at sampled tokens.
        discount: Factor for each sampled token.

    Returns:
        float64 [T]; 0 under the mask.

    Example:
        >>> reward_to_go(np.array([0.0, 0.0, 9.0, 2.0]), np.array([True, True, False, True]), discount=0.5).tolist()
        [0.5, 1.0, 0.0, 2.0]
    """
    zeros_T = np.zeros(len(mask_T))
    # With values of 0 and lambda = 1 the generalised advantage is the return itself.
    return generalised_advantages(rewards_T, zeros_T, mask_T, discount=discount, trace=1.0)[0]


def generalised_advantages(
    rewards_T: np.ndarray, values_T: np.ndarray, mask_T: np.ndarray, *, discount: float, trace: float
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantages, and the returns that a critic is trained on.

    ``delta_n = r_n + discount * V_{n+1} - V_n`` and ``A_n = delta_n + discount * trace * A_{n+1}``, where n counts
    sampled tokens only, and the value after the last is 0. Source: GAE, Schulman et al. 2015, arXiv:1506.02438, eq. 16.

    Args:
        rewards_T: Reward of each token.
        values_T: The critic's value before each token.
        mask_T: bool, true at sampled tokens.
        discount: gamma.
        trace: lambda.

    Returns:
        Advantages and returns (``A + V``), float64 [T]; 0 under the mask.

    Example:
        >>> advantages_T, returns_T = generalised_advantages(
        ...     np.array([0.0, 1.0]), np.array([0.25, 0.5]), np.array([True, True]), discount=1.0, trace=0.0)
        >>> advantages_T.tolist(), returns_T.tolist()
        ([0.25, 0.5], [0.5, 1.0])
    """
    assert mask_T.dtype == np.bool_, mask_T.dtype
    rewards_N, values_N = (np.asarray(values, np.float64)[mask_T] for values in (rewards_T, values_T))
    advantages_N = np.zeros(len(rewards_N))
    next_advantage = next_value = 0.0
    for n in reversed(range(len(rewards_N))):
        delta = rewards_N[n] + discount * next_value - values_N[n]
        next_advantage = advantages_N[n] = delta + discount * trace * next_advantage
        next_value = values_N[n]
    advantages_T, returns_T = np.zeros((2, len(mask_T)))
    advantages_T[mask_T] = advantages_N
    returns_T[mask_T] = advantages_N + values_N
    return advantages_T, returns_T


def turn_returns(rewards_U: np.ndarray, *, discount: float) -> np.ndarray:
    """The discounted sum of the rewards of a turn and the turns after it; time counts turns.

    Example:
        >>> turn_returns(np.array([0.0, 1.0, 2.0]), discount=0.5).tolist()
        [1.0, 2.0, 2.0]
    """
    mask_U = np.ones(len(rewards_U), dtype=bool)
    return reward_to_go(rewards_U, mask_U, discount=discount)


def spread_over_turns(values_U: np.ndarray, turns_T: np.ndarray, mask_T: np.ndarray) -> np.ndarray:
    """Each sampled token gets the value of its turn: per-turn advantages of a multi-turn episode.

    Args:
        values_U: A number for each turn.
        turns_T: int, index of the token's turn; ignored under the mask.
        mask_T: bool, true at sampled tokens.

    Returns:
        float64 [T]; 0 under the mask.

    Example:
        >>> spread_over_turns(np.array([3.0, 4.0]), np.array([0, -1, 1]), np.array([True, False, True])).tolist()
        [3.0, 0.0, 4.0]
    """
    values_T = np.zeros(len(mask_T))
    values_T[mask_T] = np.asarray(values_U, np.float64)[np.asarray(turns_T)[mask_T]]
    return values_T
