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

from fourstroke.algorithms.advantages import episode_advantages, soft_overlong_penalty
from fourstroke.algorithms.aggregation import token_weights
from fourstroke.config import AlgorithmConfig
from fourstroke.errors import DataError
from fourstroke.trainer.packing import shared_among
from fourstroke.types import BatchRecord, EpisodeRecord, GroupRecord, RowRecord, Scored, StopReason


def build_batches(
    groups: Sequence[GroupRecord], *, step: int, algorithm: AlgorithmConfig, max_tokens: int
) -> tuple[BatchRecord, ...]:
    """The batches of a step, one for each optimiser update; groups are never divided.

    Args:
        groups: The step's groups, in admission order.
        step: Number of the step, for logs.
        algorithm: Terms of the objective.
        max_tokens: Longest reply that the run allows, the normaliser of ``aggregation = "constant"``.

    Raises:
        DataError: ``advantage = "decoupled"``, and not all scores have the same components.
    """
    advantages = _advantages(groups, algorithm=algorithm, max_tokens=max_tokens)
    num_updates = min(algorithm.updates_per_step, len(groups))
    bounds = itertools.pairwise(np.linspace(0, len(groups), num_updates + 1).astype(int))
    batches = (
        _batch(groups[low:high], advantages, step=step, update=update, algorithm=algorithm, max_tokens=max_tokens)
        for update, (low, high) in enumerate(bounds)
    )
    # With a single update the proximal policy is the current one, which the trainer knows anyway.
    return tuple(msgspec.structs.replace(batch, needs_proximal=num_updates > 1) for batch in batches)


def _advantages(
    groups: Sequence[GroupRecord], *, algorithm: AlgorithmConfig, max_tokens: int
) -> dict[tuple[str, int], float]:
    """Advantages of the step's scored members, by group and member; a member without a score is in no baseline."""
    scored = [(group.id, episode) for group in groups for episode in group.scored]
    scores_E = np.concatenate([np.zeros(0), *(group.scores_G for group in groups)])
    lengths_E = np.array([episode.num_sampled_tokens for _, episode in scored])
    if algorithm.overlong_share > 0:
        buffer = max(1, round(algorithm.overlong_share * max_tokens))
        scores_E = scores_E + soft_overlong_penalty(lengths_E, max_tokens=max_tokens, buffer=buffer)
    advantages_E = episode_advantages(
        scores_E,
        np.array([group for group, _ in scored]),
        lengths_E=lengths_E,
        components_EK=_components(scored) if algorithm.advantage == "decoupled" else np.zeros((len(scored), 0)),
        kind=algorithm.advantage,
        pass_k=algorithm.pass_k,
    )
    return {(group, episode.member): float(value) for (group, episode), value in zip(scored, advantages_E, strict=True)}


def _components(scored: Sequence[tuple[str, EpisodeRecord]]) -> np.ndarray:
    """float64 [E, K]: components of the scores by name; an episode without one of them cannot be compared.

    Raises:
        DataError: Scores of the step have no components, or not all the same; the text names the first such episode.
    """
    rows = [episode.verdict.components for _, episode in scored if isinstance(episode.verdict, Scored)]
    names = sorted({name for row in rows for name in row})
    for (group, episode), row in zip(scored, rows, strict=True):
        if not row or row.keys() != set(names):
            raise DataError(
                f"episode {group}.{episode.member} has the score's components {sorted(row)}, where the step has "
                f"{names}; algorithm.advantage = 'decoupled' needs the same ones of every episode, so have the grader "
                "give all of them, or choose another"
            )
    return np.array([[row[name] for name in names] for row in rows], dtype=np.float64).reshape(len(rows), len(names))


def _group_rows(
    group: GroupRecord, advantages: dict[tuple[str, int], float], *, algorithm: AlgorithmConfig
) -> Iterator[RowRecord]:
    """Rows of the scored members that train. Weights come later, from these rows alone."""
    advantage_of = {
        episode.member: advantages[group.id, episode.member]
        for episode in group.scored
        if not (algorithm.mask_truncated and episode.stop is StopReason.LENGTH)
    }
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
    groups: Sequence[GroupRecord],
    advantages: dict[tuple[str, int], float],
    *,
    step: int,
    update: int,
    algorithm: AlgorithmConfig,
    max_tokens: int,
) -> BatchRecord:
    rows = [row for group in groups for row in _group_rows(group, advantages, algorithm=algorithm)]
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
