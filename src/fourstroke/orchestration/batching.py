"""From a step's groups to its optimiser batches: advantages, and each token's share of the loss. NumPy, no I/O.

    groups -> rows -> advantages by group -> batches (one an update) -> weights with the batch's global denominators

A batch's counts are those of all its rows, with gradient or not, so that skipping rows changes no denominator.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from fourstroke.algorithms.advantages import group_advantages
from fourstroke.algorithms.aggregation import token_weights
from fourstroke.config import AlgorithmConfig
from fourstroke.tokens import episode_rows
from fourstroke.types import Batch, Column, Group, Trajectory


def build_batches(
    groups: Sequence[Group], *, step: int, algorithm: AlgorithmConfig, max_tokens: int
) -> tuple[Batch, ...]:
    """The batches of a step, one for each optimiser update; groups are never divided.

    Args:
        groups: The step's groups, in admission order.
        step: Number of the step, for logs.
        algorithm: Terms of the objective.
        max_tokens: Longest reply that the run allows, the normaliser of ``aggregation = "constant"``.

    Raises:
        DataError: An episode's log-probabilities are not finite.
    """
    num_updates = min(algorithm.updates_per_step, len(groups))
    bounds = np.linspace(0, len(groups), num_updates + 1).astype(int)
    return tuple(
        _batch(groups[low:high], step=step, algorithm=algorithm, max_tokens=max_tokens)
        for low, high in itertools.pairwise(bounds)
    )


def group_rows(group: Group, *, algorithm: AlgorithmConfig) -> list[Trajectory]:
    """Rows of a group's scored members, with their advantages; a member without a score is in no baseline and no row.

    Raises:
        DataError: An episode's log-probabilities are not finite.
    """
    advantages_G = group_advantages(group.scores_G, kind=algorithm.advantage)
    rows = []
    for member, advantage in zip(group.scored, advantages_G, strict=True):
        for row in episode_rows(member.episode):
            values = np.where(row[Column.LOSS_MASK], advantage, 0.0).astype(np.float32)
            rows.append(row.with_columns(advantages=values))
    return rows


def _batch(groups: Sequence[Group], *, step: int, algorithm: AlgorithmConfig, max_tokens: int) -> Batch:
    rows = [row for group in groups for row in group_rows(group, algorithm=algorithm)]
    num_tokens_B = np.array([row.num_loss_tokens for row in rows], dtype=np.int64)
    weights_B = token_weights(num_tokens_B, kind=algorithm.aggregation, max_tokens=max_tokens)
    weighted = tuple(
        row.with_columns(weight=np.where(row[Column.LOSS_MASK], weight, 0.0).astype(np.float32))
        for row, weight in zip(rows, weights_B, strict=True)
    )
    return Batch(step=step, rows=weighted, num_sequences=len(rows), num_loss_tokens=int(num_tokens_B.sum()))
