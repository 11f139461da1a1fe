"""Cuts rows into micro-batches, on lengths alone. No torch: the controller plans, the ranks compute.

A micro-batch is padded to its longest row, so rows of like length go together.
"""

from __future__ import annotations

from collections.abc import Sequence

from fourstroke.errors import DataError
from fourstroke.types import Microbatch


def plan(lengths: Sequence[int], *, max_tokens: int) -> tuple[Microbatch, ...]:
    """Micro-batches that hold every row exactly once, each with ``rows * longest row <= max_tokens``.

    Rows are taken from the shortest to the longest (equal ones in their order), and a micro-batch is closed when the
    next row would make it too large; so the same lengths always give the same plan.

    Args:
        lengths: Tokens of each row, prompt and all.
        max_tokens: Most tokens of a micro-batch, padding included.

    Raises:
        DataError: A row alone is longer than ``max_tokens``; the text names its position.

    Example:
        >>> [microbatch.rows for microbatch in plan([3, 9, 4], max_tokens=10)]
        [(0, 2), (1,)]
    """
    microbatches: list[Microbatch] = []
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda position: (lengths[position], position)):
        if lengths[row] > max_tokens:
            raise DataError(
                f"row {row} has {lengths[row]} tokens, more than a micro-batch may hold "
                f"(trainer.microbatch_tokens = {max_tokens}); raise that key or shorten the row"
            )
        if rows and (len(rows) + 1) * lengths[row] > max_tokens:
            microbatches.append(Microbatch(rows=tuple(rows)))
            rows = []
        rows.append(row)
    if rows:
        microbatches.append(Microbatch(rows=tuple(rows)))
    return tuple(microbatches)
