"""Packs rows without padding: ``plan`` cuts a batch on lengths alone, ``assemble`` lays out a micro-batch in its rank.

No torch: the controller plans, the ranks compute. Tokens that several rows of a micro-batch begin with are computed
once, so rows make a tree, laid out depth first; a token attends to the tokens before it on its own path alone:

    rows      a b c d      a b c e f      g h
    packed    a b c  d  e f  g h          segments: abc, d (after abc), ef (after abc), gh
    position  0 1 2  3  3 4  0 1
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fourstroke.errors import DataError
from fourstroke.tokens import num_shared
from fourstroke.types import Microbatch

# --- plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows that are planned as one, with the tokens that they make when packed."""

    rows: tuple[int, ...]
    num_tokens: int


def plan(lengths: Sequence[int], *, max_tokens: int, shared: Sequence[int] | None = None) -> tuple[Microbatch, ...]:
    """Micro-batches that hold every row exactly once, each of at most ``max_tokens`` tokens when packed.

    Rows that share their beginning stay together where they fit. The number of micro-batches is that of best fit in
    order of falling size; rows are then spread evenly over as many, where that fits too. The same lengths always give
    the same plan, and rows of a micro-batch are in their order.

    Args:
        lengths: Tokens of each row, prompt and all.
        max_tokens: Most tokens of a micro-batch, where a shared beginning counts once.
        shared: Of each row, how many of its first tokens the row before it begins with too; none if not given.

    Raises:
        DataError: A row alone is longer than ``max_tokens``; the text names its position.

    Example:
        >>> [microbatch.rows for microbatch in plan([3, 9, 4], max_tokens=10)]
        [(1,), (0, 2)]
        >>> [microbatch.rows for microbatch in plan([8, 9, 8], shared=[0, 7, 7], max_tokens=11)]
        [(0, 1, 2)]
    """
    for row, length in enumerate(lengths):
        if length > max_tokens:
            raise DataError(
                f"row {row} has {length} tokens, more than a micro-batch may hold "
                f"(trainer.microbatch_tokens = {max_tokens}); raise that key or shorten the row"
            )
    shared = [0] * len(lengths) if shared is None else shared
    units = sorted(_units(lengths, shared, max_tokens=max_tokens), key=lambda unit: (-unit.num_tokens, unit.rows))
    fitted = _best_fit(units, max_tokens=max_tokens)
    bins = _spread(units, num_bins=len(fitted), max_tokens=max_tokens) or fitted
    return tuple(Microbatch(rows=tuple(sorted(row for unit in units for row in unit.rows))) for units in bins)


def shared_among(shared: Sequence[int], kept: Sequence[int]) -> list[int]:
    """What each kept row surely shares with the kept row before it, if each row shares ``shared`` with the one before.

    Two rows begin alike as far as every row from the one to the other does.

    Args:
        shared: Of each row, how many of its first tokens the row before it begins with too.
        kept: Positions of the rows that are left, in order.

    Example:
        >>> shared_among([0, 7, 5, 7], [1, 3])
        [0, 5]
    """
    starts = itertools.chain([0], (row + 1 for row in kept))
    return [min(shared[start : row + 1]) for start, row in zip(starts, kept, strict=False)]


def _units(lengths: Sequence[int], shared: Sequence[int], *, max_tokens: int) -> Iterator[_Unit]:
    """Runs of rows that share a beginning, cut where they would not fit: the first row of a part pays for its all."""
    rows: list[int] = []
    num_tokens = 0
    for row, length in enumerate(lengths):
        if rows and (shared[row] == 0 or num_tokens + length - shared[row] > max_tokens):
            yield _Unit(rows=tuple(rows), num_tokens=num_tokens)
            rows = []
        num_tokens = num_tokens + length - shared[row] if rows else length
        rows.append(row)
    if rows:
        yield _Unit(rows=tuple(rows), num_tokens=num_tokens)


def _best_fit(units: Sequence[_Unit], *, max_tokens: int) -> list[list[_Unit]]:
    """Each unit into the fullest bin that has room for it."""
    bins: list[list[_Unit]] = []
    rooms: list[tuple[int, int]] = []
    for unit in units:
        at = bisect.bisect_left(rooms, (unit.num_tokens, -1))
        if at == len(rooms):
            bins.append([unit])
            bisect.insort(rooms, (max_tokens - unit.num_tokens, len(bins) - 1))
            continue
        room, index = rooms.pop(at)
        bins[index].append(unit)
        bisect.insort(rooms, (room - unit.num_tokens, index))
    return bins


def _spread(units: Sequence[_Unit], *, num_bins: int, max_tokens: int) -> list[list[_Unit]] | None:
    """Each unit into the emptiest bin; nothing if one overflows."""
    bins: list[list[_Unit]] = [[] for _ in range(num_bins)]
    loads = [(0, index) for index in range(num_bins)]
    for unit in units:
        load, index = loads[0]
        if load + unit.num_tokens > max_tokens:
            return None
        bins[index].append(unit)
        heapq.heapreplace(loads, (load + unit.num_tokens, index))
    return bins


# --- assemble ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """Packed tokens ``start`` to ``stop`` that follow each other in some row, with no branch between them.

    Attributes:
        start: First packed token.
        stop: One past the last.
        parent: Number of the segment that comes before it in its rows; -1 where the rows begin.

    Example:
        >>> Segment(start=3, stop=4, parent=0).num_tokens
        1
    """

    start: int
    stop: int
    parent: int

    @property
    def num_tokens(self) -> int:
        """How many tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch as one row of tokens.

    Attributes:
        ids_T: int64 token ids.
        positions_T: int64, each token's position in its rows.
        segments: The tree, depth first; they cover all tokens in order.
        slots: Of each row, int64 [its length]: which packed token each of its tokens is.

    Example:
        >>> assemble([np.array([5, 6, 7]), np.array([5, 6, 8, 9])]).ids_T.tolist()
        [5, 6, 7, 8, 9]
    """

    ids_T: np.ndarray
    positions_T: np.ndarray
    segments: tuple[Segment, ...]
    slots: tuple[np.ndarray, ...]


def assemble(rows: Sequence[np.ndarray]) -> Packed:
    """Pack rows, each shared beginning once.

    Args:
        rows: Token ids of each row, at least one token each.

    Example:
        >>> packed = assemble([np.array([5, 6, 7]), np.array([5, 6, 8, 9])])
        >>> packed.positions_T.tolist(), packed.slots[1].tolist()
        ([0, 1, 2, 2, 3], [0, 1, 3, 4])
        >>> [(segment.start, segment.stop, segment.parent) for segment in packed.segments]
        [(0, 2, -1), (2, 3, 0), (3, 5, 0)]
    """
    # Big-endian bytes are ordered as the ids are, and rows of one beginning lie together.
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">u4").tobytes())
    slots = [np.empty(len(row), dtype=np.int64) for row in rows]
    segments: list[Segment] = []
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    num_tokens = 0
    # Rows that agree on their first `depth` tokens, whose last segment is `parent`.
    open_branches = [(order, 0, -1)]
    while open_branches:
        members, depth, parent = open_branches.pop()
        common = depth + num_shared(rows[members[0]][depth:], rows[members[-1]][depth:])
        if common > depth:
            stop = num_tokens + common - depth
            segments.append(Segment(start=num_tokens, stop=stop, parent=parent))
            parent = len(segments) - 1
            ids.append(rows[members[0]][depth:common].astype(np.int64))
            positions.append(np.arange(depth, common))
            for row in members:
                slots[row][depth:common] = np.arange(num_tokens, stop)
            num_tokens = stop
        longer = (row for row in members if len(rows[row]) > common)
        branches = [list(branch) for _, branch in itertools.groupby(longer, key=lambda row: int(rows[row][common]))]
        open_branches += [(branch, common, parent) for branch in reversed(branches)]
    return Packed(
        ids_T=np.concatenate(ids), positions_T=np.concatenate(positions), segments=tuple(segments), slots=tuple(slots)
    )
