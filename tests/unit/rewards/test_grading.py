"""Every way in which a grader can fail gives an Unscored verdict with its reason; cancellation passes."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from fourstroke.errors import DataError, DeadlineError
from fourstroke.rewards import grade
from fourstroke.testing.environment import FakeGrader
from fourstroke.types import (
    Episode,
    GradedEpisode,
    Message,
    Scored,
    StopReason,
    Tamper,
    Task,
    Timings,
    Unscored,
    Verdict,
    decode,
    encode,
)

TASK = Task(id="t", prompt=(Message(role="user", content="?"),), answer="7")


def episode_of(*, reply: str = "7", stop: StopReason = StopReason.FINISHED) -> Episode:
    return Episode(
        id="g.0",
        group="g",
        member=0,
        task_id="t",
        attempt=0,
        spans=(),
        stop=stop,
        messages=(Message(role="assistant", content=reply),),
        timings=Timings(generate_s=0.0),
    )


def scored(score: Any, components: dict[str, Any] | None = None) -> Scored:
    return Scored(score=score, components=components or {}, reason="", grader="fake", cost_s=0.0)


def outcome(value: object) -> Verdict:
    return asyncio.run(grade(FakeGrader(outcomes={0: value}), TASK, episode_of(), timeout_s=5.0))


@pytest.mark.parametrize(
    ("value", "reason", "detail"),
    [
        (ZeroDivisionError("division by zero"), "error", "ZeroDivisionError: division by zero"),
        (DataError("task t is broken"), "error", "task t is broken"),
        (TimeoutError("own"), "error", "TimeoutError: own"),
        (DeadlineError("judge ran past 3 s"), "error", "judge ran past 3 s"),
        (ValueError("score must be finite, got nan from fake"), "non_finite", "got nan"),
        (None, "bad_return", "None"),
        (1.0, "bad_return", "a float"),
        (scored(1.0, {"part": float("inf")}), "non_finite", "part = inf"),
        (scored(1.0, {"part": "1"}), "bad_return", "part as a str"),
        (msgspec.structs.replace(scored(1.0), components=None), "bad_return", "components as None"),
        (msgspec.structs.replace(scored(1.0), components={7: 1.0}), "bad_return", "components as a dict"),
        (msgspec.structs.replace(scored(1.0), reason=None), "bad_return", "reason as None, not text"),
        (msgspec.structs.replace(scored(1.0), grader=7), "bad_return", "grader as a int, not text"),
        (Unscored(reason="x", detail=b"x", grader="fake", cost_s=0.0), "bad_return", "detail as a bytes"),  # type: ignore[arg-type]
        (Tamper(reason=ValueError(), grader="fake", cost_s=0.0), "bad_return", "reason as a ValueError"),  # type: ignore[arg-type]
    ],
)
def test_failures_are_unscored_with_a_typed_reason(value: object, reason: str, detail: str) -> None:
    verdict = outcome(value)

    assert isinstance(verdict, Unscored)
    assert verdict.reason == reason
    assert detail in verdict.detail
    assert verdict.grader == "fake@00000000"


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf"), np.float32("nan")])
def test_a_score_that_is_not_finite_is_unscored(score: float) -> None:
    class Broken(FakeGrader):
        async def grade(self, _task: Task, _episode: Episode) -> Any:
            return scored(score)

    verdict = asyncio.run(grade(Broken(), TASK, episode_of(), timeout_s=5.0))

    assert isinstance(verdict, Unscored)
    assert verdict.reason == "non_finite"


def test_the_clock_of_the_timeout_starts_with_the_grading() -> None:
    grader = FakeGrader(latency_s=30.0)

    async def run() -> Verdict:
        return await grade(grader, TASK, episode_of(), timeout_s=0.01)

    verdict = asyncio.run(run())
    assert isinstance(verdict, Unscored)
    assert verdict.reason == "timeout"
    assert verdict.cost_s >= 0.01


@pytest.mark.parametrize("ending", ["verdict", "error"])
def test_a_grader_that_swallows_its_cancellation_still_timed_out(ending: str) -> None:
    class Stubborn(FakeGrader):
        async def grade(self, _task: Task, _episode: Episode) -> Any:
            try:
                await asyncio.sleep(30.0)
            except asyncio.CancelledError:
                if ending == "error":
                    raise RuntimeError("interrupted") from None
            return scored(1.0)

    verdict = asyncio.run(grade(Stubborn(), TASK, episode_of(), timeout_s=0.01))

    assert isinstance(verdict, Unscored)
    assert verdict.reason == "timeout"


def test_cancellation_from_outside_passes() -> None:
    async def run() -> None:
        running = asyncio.ensure_future(grade(FakeGrader(latency_s=30.0), TASK, episode_of(), timeout_s=60.0))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())


@pytest.mark.parametrize(("stop", "reason"), [(StopReason.FAILED, "environment"), (StopReason.ABORTED, "aborted")])
def test_an_episode_that_did_not_end_is_unscored_and_the_grader_is_not_asked(stop: StopReason, reason: str) -> None:
    grader = FakeGrader()

    verdict = asyncio.run(grade(grader, TASK, episode_of(stop=stop), timeout_s=5.0))

    assert isinstance(verdict, Unscored)
    assert verdict.reason == reason
    assert grader.num_calls == 0


def test_a_reply_cut_by_length_is_graded() -> None:
    verdict = asyncio.run(grade(FakeGrader(), TASK, episode_of(stop=StopReason.LENGTH), timeout_s=5.0))

    assert isinstance(verdict, Scored)
    assert verdict.score == 1.0


def test_cost_is_the_graders_time_and_numbers_become_plain_floats() -> None:
    given = scored(np.float32(0.5), {"part": np.float32(0.25), "flag": True})
    grader = FakeGrader(outcomes={0: given}, latency_s=0.01)

    verdict = asyncio.run(grade(grader, TASK, episode_of(), timeout_s=5.0))

    assert isinstance(verdict, Scored)
    assert (verdict.score, verdict.components) == (0.5, {"part": 0.25, "flag": 1.0})
    assert {type(number) for number in (verdict.score, *verdict.components.values())} == {float}
    assert 0.01 <= verdict.cost_s < 5.0


@pytest.mark.parametrize(
    "value",
    [
        RuntimeError("bad reply \ud800" + "x" * 1_000_000),
        Unscored(reason="judge", detail="\ud800", grader="fake", cost_s=0.0),
        Unscored(reason="\ud800", detail="", grader="\ud800", cost_s=0.0),
        Tamper(reason="\ud800", grader="fake", cost_s=0.0),
        Scored(score=1.0, components={"\ud800" * 5000: 1.0}, reason="", grader="fake", cost_s=0.0),
        Scored(score=1.0, components={}, reason="\ud800" * 5000, grader="fake", cost_s=0.0),
    ],
)
def test_hostile_text_in_a_reason_cannot_break_the_codec(value: object) -> None:
    verdict = outcome(value)

    data = encode(GradedEpisode(episode=episode_of(), verdict=verdict))
    assert decode(data, GradedEpisode).verdict == verdict
    assert len(msgspec.msgpack.encode(verdict)) < 3000


def test_a_task_that_is_not_the_episodes_is_a_programmers_mistake() -> None:
    other = Task(id="u", prompt=(), answer="7")
    with pytest.raises(AssertionError):
        asyncio.run(grade(FakeGrader(), other, episode_of(), timeout_s=5.0))
