"""The boundary where a grader's failure becomes an :class:`Unscored` verdict with a typed reason; never a number.

Reasons given here: ``environment`` and ``aborted`` (the episode did not come to its end, and the grader was not asked),
``error`` (the grader raised), ``timeout``, ``bad_return`` (not a verdict) and ``non_finite``.
"""

from __future__ import annotations

import asyncio
import math
import numbers
from typing import Any

import msgspec

from fourstroke.errors import FourstrokeError, GradingError, boundary
from fourstroke.types import Episode, Grader, Scored, StopReason, Tamper, Task, Unscored, Verdict

_NOT_GRADED = {
    StopReason.FAILED: ("environment", "the environment or the engine failed before there was an episode to grade"),
    StopReason.ABORTED: ("aborted", "the episode was aborted before it came to its end"),
}

_MAX_TEXT_CHARACTERS = 1000


async def grade(grader: Grader, task: Task, episode: Episode, *, timeout_s: float) -> Verdict:
    """The verdict on one episode, with its cost in seconds of the event loop's clock.

    The clock starts here: whoever queues episodes does so before calling. A reply that was cut by length is graded as
    it stands. Cancellation passes. A grader that computes without awaiting cannot be interrupted by ``timeout_s``.

    Args:
        grader: Code that may be the user's, and may fail in any way.
        task: The task that was attempted.
        episode: The attempt.
        timeout_s: Seconds from now until the grader is given up.

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

    def unscored(reason: str, detail: str) -> Unscored:
        return Unscored(reason=reason, detail=_clean(detail), grader=grader.name, cost_s=loop.time() - started)

    if episode.stop in _NOT_GRADED:
        return unscored(*_NOT_GRADED[episode.stop])
    late = f"grader {grader.name} ran past {timeout_s} s on episode {episode.id}"
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            with boundary(f"grader {grader.name} on episode {episode.id}", GradingError):
                returned: object = await grader.grade(task, episode)
    except FourstrokeError as error:
        # A grader may turn its own cancellation into another error; then it was still the deadline that ended it.
        return unscored("timeout", late) if deadline.expired() else unscored(_reason_of(error), str(error))
    except TimeoutError:
        return unscored("timeout", late)
    if deadline.expired():
        return unscored("timeout", late)
    match returned:
        case Scored():
            return _checked(returned, cost_s=loop.time() - started) or unscored(*_fault_of(returned))
        case Unscored():
            return msgspec.structs.replace(returned, detail=_clean(returned.detail), cost_s=loop.time() - started)
        case Tamper():
            return msgspec.structs.replace(returned, reason=_clean(returned.reason), cost_s=loop.time() - started)
    return unscored("bad_return", f"grader {grader.name} returned {_kind(returned)}, not a verdict")


def _checked(verdict: Scored, *, cost_s: float) -> Scored | None:
    """The verdict with plain, finite floats, or None where it has none."""
    numbers_given = (verdict.score, *verdict.components.values())
    if not all(isinstance(value, numbers.Real) and math.isfinite(value) for value in numbers_given):
        return None
    return msgspec.structs.replace(
        verdict,
        score=float(verdict.score),
        components={name: float(value) for name, value in verdict.components.items()},
        reason=_clean(verdict.reason),
        cost_s=cost_s,
    )


def _fault_of(verdict: Scored) -> tuple[str, str]:
    given: dict[str, Any] = {"score": verdict.score, **verdict.components}
    for name, value in given.items():
        if not isinstance(value, numbers.Real):
            return "bad_return", f"grader {verdict.grader} gave {name} as {_kind(value)}, not a number"
    return "non_finite", f"grader {verdict.grader} gave {given!r}"


def _reason_of(error: FourstrokeError) -> str:
    """``Scored`` refuses a score that is not finite with a plain ValueError, inside the grader."""
    return "non_finite" if str(error.__cause__).startswith("score must be finite") else "error"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _clean(text: str) -> str:
    """Text that any log can hold: errors and reasons may repeat a hostile reply, lone surrogates and all."""
    return text[:_MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode()
