"""From a step's group records to its optimiser batches: advantages, and each row's share of the loss. No I/O.

    groups -> rows -> advantages by group -> batches (one an update) -> weights with the batch's global denominators

Lengths and scores are all it reads; tokens stay in the store. A batch's counts are those of all its rows, with gradient
or not, so that skipping rows changes no denominator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from fourstroke.algorithms.advantages import group_advantages
from fourstroke.algorithms.aggregation import token_weights
from fourstroke.config import AlgorithmConfig
from fourstroke.trainer.packing import shared_among
from fourstroke.types import BatchRecord, GroupRecord, RowRecord


def build_batches(
    groups: Sequence[GroupRecord], *, step: int, algorithm: AlgorithmConfig, max_tokens: int
) -> tuple[BatchRecord, ...]:
    """The batches of a step, one for each optimiser update; groups are never divided.

    Args:
        groups: The step's groups, in admission order.
        step: Number of the step, for logs.
        algorithm: Terms of the objective.
        max_tokens: Longest reply that the run allows, the normaliser of ``aggregation = "constant"``.
    """
    num_updates = min(algorithm.updates_per_step, len(groups))
    bounds = itertools.pairwise(np.linspace(0, len(groups), num_updates + 1).astype(int))
    batches = (
        _batch(groups[low:high], step=step, update=update, algorithm=algorithm, max_tokens=max_tokens)
        for update, (low, high) in enumerate(bounds)
    )
    # With a single update the proximal policy is the current one, which the trainer knows anyway.
    return tuple(msgspec.structs.replace(batch, needs_proximal=num_updates > 1) for batch in batches)


def _group_rows(group: GroupRecord, *, algorithm: AlgorithmConfig) -> Iterator[RowRecord]:
    """Rows of the scored members; a member without a score is in no baseline and no row. Weights come later."""
    advantages_G = group_advantages(group.scores_G, kind=algorithm.advantage)
    advantage_of = {episode.member: float(value) for episode, value in zip(group.scored, advantages_G, strict=True)}
    rows = [(episode.member, number, shape) for episode in group.episodes for number, shape in enumerate(episode.rows)]
    kept = [position for position, (member, _, _) in enumerate(rows) if member in advantage_of]
    shared = shared_among([shape.num_shared_tokens for _, _, shape in rows], kept)
    for position, num_shared_tokens in zip(kept, shared, strict=True):
        member, number, shape = rows[position]
        yield RowRecord(
            group=group.id,
            member=member,
            row=number,
            num_tokens=shape.num_tokens,
            num_loss_tokens=shape.num_loss_tokens,
            num_shared_tokens=num_shared_tokens,
            advantage=advantage_of[member],
            weight=0.0,
        )


def _batch(
    groups: Sequence[GroupRecord], *, step: int, update: int, algorithm: AlgorithmConfig, max_tokens: int
) -> BatchRecord:
    rows = [row for group in groups for row in _group_rows(group, algorithm=algorithm)]
    num_tokens_B = np.array([row.num_loss_tokens for row in rows], dtype=np.int64)
    weights_B = token_weights(num_tokens_B, kind=algorithm.aggregation, max_tokens=max_tokens)
    return BatchRecord(
        step=step,
        update=update,
        references={group.id: group.reference for group in groups},
        rows=tuple(
            msgspec.structs.replace(row, weight=float(weight)) for row, weight in zip(rows, weights_B, strict=True)
        ),
        num_sequences=len(rows),
        num_loss_tokens=int(num_tokens_B.sum()),
        needs_proximal=False,
    )
