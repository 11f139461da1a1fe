"""The boundary where a grader's failure becomes an :class:`Unscored` verdict with a typed reason; never a number.

Reasons given here: ``environment`` and ``aborted`` (the episode did not come to its end, and the grader was not asked),
``error`` (the grader raised), ``timeout``, ``bad_return`` (not a verdict) and ``non_finite``. Where the grader runs in
a process, ``dispatch`` gives ``timeout`` and ``crashed``.
"""

from __future__ import annotations

import asyncio
import math
import numbers

import msgspec

from fourstroke.errors import FourstrokeError, GradingError, boundary
from fourstroke.types import Episode, Grader, Scored, StopReason, Tamper, Task, Unscored, Verdict

_NOT_GRADED = {
    StopReason.FAILED: ("environment", "the environment or the engine failed before there was an episode to grade"),
    StopReason.ABORTED: ("aborted", "the episode was aborted before it came to its end"),
}

_MAX_TEXT_CHARACTERS = 1000
# Fields of verdicts that hold text.
_TEXTS = frozenset({"reason", "detail", "grader"})


async def grade(grader: Grader, task: Task, episode: Episode, *, timeout_s: float | None) -> Verdict:
    """The verdict on one episode, with its cost in seconds of the event loop's clock.

    The clock starts here: whoever queues episodes does so before calling. A reply that was cut by length is graded as
    it stands. Cancellation passes. A grader that computes without awaiting cannot be interrupted by ``timeout_s``, so
    a user's grader runs in a process (``process``), whose driver has the clock and can kill.

    Args:
        grader: Code that may be the user's, and may fail in any way.
        task: The task that was attempted.
        episode: The attempt.
        timeout_s: Seconds from now until the grader is given up; None where somebody else has the clock.

    Returns:
        The grader's verdict, or ``Unscored`` with the reason why there is none.

    Example:
        >>> verdict = await grade(numeric(), task, episode, timeout_s=30.0)  # doctest: +SKIP
        >>> verdict.score  # doctest: +SKIP
        1.0
    """
    assert task.id == episode.task_id, (task.id, episode.task_id)
    loop = asyncio.get_running_loop()
    started = loop.time()
    if episode.stop in _NOT_GRADED:
        reason, detail = _NOT_GRADED[episode.stop]
        return Unscored(reason=reason, detail=detail, grader=grader.name, cost_s=0.0)
    returned: object = None
    fault: tuple[str, str] | None = None
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            with boundary(f"grader {grader.name} on episode {episode.id}", GradingError):
                returned = await grader.grade(task, episode)
    except (FourstrokeError, TimeoutError) as error:
        fault = _reason_of(error), str(error)
    # Asked last, since a grader may turn its own cancellation into another error, or into a verdict.
    if deadline.expired():
        fault = "timeout", f"grader {grader.name} ran past {timeout_s} s on episode {episode.id}"
    cost_s = loop.time() - started
    fault = fault or _fault_of(returned)
    if fault is not None:
        reason, detail = fault
        return Unscored(reason=reason, detail=_clean(detail), grader=grader.name, cost_s=cost_s)
    assert isinstance(returned, Scored | Unscored | Tamper), returned
    return _plain(returned, cost_s=cost_s)


def _reason_of(error: BaseException) -> str:
    """``Scored`` refuses a score that is not finite with a plain ValueError, inside the grader."""
    return "non_finite" if str(error.__cause__).startswith("score must be finite") else "error"


def _fault_of(returned: object) -> tuple[str, str] | None:
    """What is wrong with what a grader returned, if anything: a noun does not check its fields when it is made."""
    if not isinstance(returned, Scored | Unscored | Tamper):
        return "bad_return", f"the grader returned {_kind(returned)}, not a verdict"
    fields = msgspec.structs.asdict(returned)
    for name in _TEXTS & fields.keys():
        if not isinstance(fields[name], str):
            return "bad_return", f"the grader gave {name} as {_kind(fields[name])}, not text"
    if isinstance(returned, Scored):
        components: object = returned.components
        if not isinstance(components, dict) or not all(isinstance(name, str) for name in components):
            return "bad_return", f"the grader gave components as {_kind(components)}, not numbers by name"
        given: dict[str, object] = {"score": returned.score, **components}
        for name, value in given.items():
            if not isinstance(value, numbers.Real):
                return "bad_return", f"the grader gave {name} as {_kind(value)}, not a number"
            if not math.isfinite(value):
                return "non_finite", f"the grader gave {name} = {value}"
    return None


def _plain(verdict: Verdict, *, cost_s: float) -> Verdict:
    """The verdict with its cost, plain floats for numbers, and text that any log can hold."""
    texts = {name: _clean(text) for name, text in msgspec.structs.asdict(verdict).items() if name in _TEXTS}
    if isinstance(verdict, Scored):
        components = {_clean(name): float(value) for name, value in verdict.components.items()}
        return msgspec.structs.replace(
            verdict, score=float(verdict.score), components=components, cost_s=cost_s, **texts
        )
    return msgspec.structs.replace(verdict, cost_s=cost_s, **texts)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _clean(text: str) -> str:
    """Text that any log can hold: errors and reasons may repeat a hostile reply, lone surrogates and all."""
    return text[:_MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode()
