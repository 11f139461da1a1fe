"""What to do about a fault: a pure policy, (fault, faults before it) -> retry | replace | shrink | stop.

    a group is lost or late      retry, with the same seed    after ``max_attempts``: shrink (drop it, draw another)
    an engine dies               replace                      out of replacements: shrink while another lives, else stop
    a worker dies                replace                      the same
    the trainer dies             replace, from the newest checkpoint               out of replacements: stop

Replacements are counted over the last ten steps, so that a run of weeks is not stopped by deaths that are far apart,
and a part that dies at each attempt stops it soon. No I/O, no clock: mechanism is elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fourstroke.config import SupervisionConfig

_MEMORY_STEPS = 10


class FaultKind(StrEnum):
    """What went wrong."""

    ENGINE_DIED = "engine_died"
    WORKER_DIED = "worker_died"
    TRAINER_DIED = "trainer_died"
    GROUP_LOST = "group_lost"
    GROUP_LATE = "group_late"


class Action(StrEnum):
    """What is done about it."""

    RETRY = "retry"
    REPLACE = "replace"
    SHRINK = "shrink"
    STOP = "stop"


_OF_GROUPS = (FaultKind.GROUP_LOST, FaultKind.GROUP_LATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: What went wrong.
        subject: The part that died, or the group's key.
        step: Step that the run was at.
        num_others: Parts of the kind that still live; 0 for a group.
        reason: What was seen, in a sentence.
    """

    kind: FaultKind
    subject: str
    step: int
    num_others: int
    reason: str


def decide(fault: Fault, history: Sequence[Fault], *, limits: SupervisionConfig) -> Action:
    """The action for a fault.

    Args:
        fault: The new fault.
        history: The faults before it, without it.
        limits: How much is tried.

    Example:
        >>> fault = Fault(kind=FaultKind.ENGINE_DIED, subject="vllm-0", step=3, num_others=0, reason="signal 9")
        >>> decide(fault, [], limits=SupervisionConfig()).value
        'replace'
        >>> decide(fault, [fault] * 3, limits=SupervisionConfig()).value
        'stop'
    """
    if fault.kind in _OF_GROUPS:
        num_before = sum(past.kind in _OF_GROUPS and past.subject == fault.subject for past in history)
        return Action.RETRY if num_before + 1 < limits.max_attempts else Action.SHRINK
    num_before = sum(past.kind not in _OF_GROUPS and past.step > fault.step - _MEMORY_STEPS for past in history)
    if num_before < limits.max_replacements:
        return Action.REPLACE
    return Action.SHRINK if fault.num_others else Action.STOP


class Supervisor:
    """Keeps the history of faults and asks the policy.

    Example:
        >>> supervisor = Supervisor(SupervisionConfig(max_attempts=2))
        >>> lost = Fault(kind=FaultKind.GROUP_LOST, subject="e0000-i000012", step=1, num_others=0, reason="engine died")
        >>> [supervisor.decide(lost).value, supervisor.decide(lost).value]
        ['retry', 'shrink']
    """

    def __init__(self, limits: SupervisionConfig) -> None:
        self._limits = limits
        self._history: list[Fault] = []

    def decide(self, fault: Fault) -> Action:
        """The action for a new fault, which is then remembered."""
        action = decide(fault, self._history, limits=self._limits)
        self._history = [past for past in self._history if past.step > fault.step - _MEMORY_STEPS]
        self._history.append(fault)
        return action
