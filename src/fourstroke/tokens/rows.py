"""An episode's prefix graph, cut into token rows for training.

Each leaf of the graph gives one row: the path from its root. A sampled span that several rows share is trained on in
the first of them only, so that however an episode forks, each sampled token counts once. A token's mask follows its
position and origin, never its id: a sampled stop token is an action even where its id is also the padding's.
"""

from __future__ import annotations

import numpy as np

from fourstroke.errors import DataError
from fourstroke.types import Column, Episode, MaskReason, Span, Trajectory


def episode_rows(episode: Episode) -> tuple[Trajectory, ...]:
    """Rows of an episode, in the order of their leaves; each with ids, masks, behaviour log-probabilities, versions.

    Raises:
        DataError: A sampled token's log-probability is not a finite number; the text names episode and position.
    """
    parents = {span.parent for span in episode.spans}
    leaves = [index for index in range(len(episode.spans)) if index not in parents]
    trained: set[int] = set()
    rows = []
    for number, leaf in enumerate(leaves):
        path = _path(episode.spans, leaf)
        columns = _concatenated([_span_columns(episode.spans[index], is_shared=index in trained) for index in path])
        trained |= set(path)
        row = Trajectory(id=f"{episode.id}/{number}", group=episode.group, episode=episode.id, columns=columns)
        _check_finite(row)
        rows.append(row)
    return tuple(rows)


def num_shared(first: np.ndarray, second: np.ndarray) -> int:
    """How many token ids both rows begin with.

    Example:
        >>> num_shared(np.array([5, 6, 7]), np.array([5, 6, 8, 9]))
        2
    """
    shorter = min(len(first), len(second))
    differs = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _path(spans: tuple[Span, ...], leaf: int) -> list[int]:
    path = [leaf]
    while spans[path[-1]].parent >= 0:
        assert spans[path[-1]].parent < path[-1], (path, spans[path[-1]].parent)
        path.append(spans[path[-1]].parent)
    return path[::-1]


def _span_columns(span: Span, *, is_shared: bool) -> dict[Column, np.ndarray]:
    num_tokens = len(span.ids)
    is_trained = span.reason is MaskReason.SAMPLED and not is_shared
    reason = MaskReason.SHARED if span.is_sampled and is_shared else span.reason
    versions = np.repeat(
        np.array([run.version for run in span.versions], dtype=np.int32),
        np.array([run.num_tokens for run in span.versions], dtype=np.int64),
    )
    return {
        Column.IDS: span.ids.astype(np.int32),
        Column.LOSS_MASK: np.full(num_tokens, is_trained),
        Column.MASK_REASON: np.full(num_tokens, reason.ordinal, dtype=np.int8),
        Column.BEHAVIOUR_LOGPROBS: (
            span.logprobs.astype(np.float32) if span.is_sampled else np.zeros(num_tokens, np.float32)
        ),
        Column.VERSIONS: versions if span.is_sampled else np.full(num_tokens, -1, dtype=np.int32),
    }


def _concatenated(parts: list[dict[Column, np.ndarray]]) -> dict[Column, np.ndarray]:
    return {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}


def _check_finite(row: Trajectory) -> None:
    logprobs_T = row[Column.BEHAVIOUR_LOGPROBS]
    bad = np.flatnonzero(row[Column.LOSS_MASK] & ~np.isfinite(logprobs_T))
    if len(bad):
        raise DataError(
            f"row {row.id} has behaviour log-probability {logprobs_T[bad[0]]} at token {bad[0]}; the episode is refused"
        )
