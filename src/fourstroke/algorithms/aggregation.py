"""The weight of a token in the loss of an optimiser step. NumPy in float64, never torch.

The loss is the plain sum of ``weight * token loss``. Each weight holds its denominator, and denominators are counted
over the whole step, so the loss cannot depend on how the rows are cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def token_mean(num_loss_tokens_B: np.ndarray, max_tokens: int) -> np.ndarray:  # noqa: ARG001 (one signature for all)
    """``1 / (loss tokens of the step)``: each token counts the same. DAPO, Yu et al. 2025, arXiv:2503.14476, 3.3."""
    return np.full(len(num_loss_tokens_B), 1.0 / num_loss_tokens_B.sum())


def sequence_mean(num_loss_tokens_B: np.ndarray, max_tokens: int) -> np.ndarray:  # noqa: ARG001
    """``1 / (sequences * loss tokens of the row)``: each sequence counts the same. GRPO, arXiv:2402.03300, eq. 3."""
    return np.asarray(1.0 / (len(num_loss_tokens_B) * np.maximum(num_loss_tokens_B, 1)))


def sequence_sum(num_loss_tokens_B: np.ndarray, max_tokens: int) -> np.ndarray:  # noqa: ARG001
    """``1 / sequences``: the mean over sequences of the sum over their tokens. RLOO, arXiv:2402.14740."""
    return np.full(len(num_loss_tokens_B), 1.0 / len(num_loss_tokens_B))


def constant(num_loss_tokens_B: np.ndarray, max_tokens: int) -> np.ndarray:
    """``1 / (sequences * max_tokens)``: the divisor is blind to lengths. Dr. GRPO, arXiv:2503.20783, section 3.2."""
    return np.full(len(num_loss_tokens_B), 1.0 / (len(num_loss_tokens_B) * max_tokens))


AGGREGATIONS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
}


def token_weights(num_loss_tokens_B: Sequence[int] | np.ndarray, *, kind: str, max_tokens: int) -> np.ndarray:
    """The weight of each loss token, row by row.

    The population is every row of one optimiser step, on all ranks: rows that are skipped because they give no gradient
    are in it, and so are rows without a loss token, which count as sequences and get the weight 0.

    Args:
        num_loss_tokens_B: Loss tokens of each row of the optimiser step.
        kind: A key of :data:`AGGREGATIONS`.
        max_tokens: The longest reply allowed, ``rollout.max_tokens``; read by ``constant``.

    Returns:
        float64 [B]: the weight that every loss token of the row carries.

    Example:
        >>> token_weights([2, 3], kind="token_mean", max_tokens=8).tolist()
        [0.2, 0.2]
        >>> token_weights([2, 4], kind="sequence_mean", max_tokens=8).tolist()
        [0.25, 0.125]
    """
    counts_B = np.asarray(num_loss_tokens_B, dtype=np.int64)
    assert counts_B.ndim == 1, counts_B.shape
    assert np.all(counts_B >= 0), counts_B
    assert max_tokens > 0, max_tokens
    if counts_B.sum() == 0:
        return np.zeros(len(counts_B))
    return np.where(counts_B > 0, AGGREGATIONS[kind](counts_B, max_tokens), 0.0)
