"""``summary.json``: the outcome of a run in one small object."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from fourstroke.types import Estimate


class RunStatus(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to.

    Attributes:
        name: The run's name.
        run_folder: Path of its folder.
        status: How it ended.
        reason: Why, in one sentence; empty if it finished.
        before: Held-out evaluation before the first step; None if it was off or was not reached.
        after: The same after the last step.
        train_seconds: Seconds from the first step's start to the last step's end.
        total_seconds: Seconds from the start of the command that a person typed.
        num_steps: Training steps that were finished.
        peak_memory_bytes: Largest PSS of all processes together, sampled each second.

    Example:
        >>> Summary(name="x", run_folder="runs/x", status=RunStatus.FINISHED, reason="", before=None, after=None,
        ...         train_seconds=600.0, total_seconds=900.0, num_steps=40, peak_memory_bytes=5 * 10**9).status.value
        'finished'
    """

    name: str
    run_folder: str
    status: RunStatus
    reason: str
    before: Estimate | None
    after: Estimate | None
    train_seconds: float
    total_seconds: float
    num_steps: int
    peak_memory_bytes: int
