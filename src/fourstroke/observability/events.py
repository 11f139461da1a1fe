"""Events: what happened once, at a time, as against a metric, which is a quantity of every step.

An event is data for people and for tests that ask "why was this group dropped?"; no part of a run may decide by it.
Text from a model goes in as it is and is escaped where it is shown, by ``printable``.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class EventKind(StrEnum):
    """What happened."""

    RUN_STARTED = "run_started"
    RUN_ENDED = "run_ended"
    PHASE_STARTED = "phase_started"
    EVALUATED = "evaluated"
    TASK_REFUSED = "task_refused"
    INCARNATION_OPENED = "incarnation_opened"
    GROUP_RETRIED = "group_retried"
    GROUP_REUSED = "group_reused"
    RESULT_LATE = "result_late"
    GROUP_DROPPED = "group_dropped"
    EPISODE_FAILED = "episode_failed"
    EPISODE_UNSCORED = "episode_unscored"
    WEIGHTS_LANDED = "weights_landed"
    CANARY_RISING = "canary_rising"
    CHECKPOINT_WRITTEN = "checkpoint_written"
    PART_REPLACED = "part_replaced"
    FAULT = "fault"
    SINK_FAILED = "sink_failed"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``events.jsonl``.

    Attributes:
        kind: What happened.
        time_s: Seconds of the event loop's clock since the run started.
        fields: To what and why, by name: ids, reasons, counts.

    Example:
        >>> event = Event(kind=EventKind.GROUP_DROPPED, time_s=12.5, fields={"group": "e0000-i000012", "num_scored": 1})
        >>> msgspec.json.encode(event).decode()
        '{"kind":"group_dropped","time_s":12.5,"fields":{"group":"e0000-i000012","num_scored":1}}'
    """

    kind: EventKind
    time_s: float
    fields: dict[str, str | int | float] = {}
