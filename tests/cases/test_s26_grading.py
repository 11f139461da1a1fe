"""S26, the grading side: a failure of the environment or the grader is an Unscored verdict and never a number."""

import asyncio

import pytest

from fourstroke.rewards import grade
from fourstroke.testing.environment import FakeGrader
from fourstroke.types import (
    Draw,
    Episode,
    GradedEpisode,
    Group,
    Message,
    StopReason,
    Task,
    Timings,
    Unscored,
)

TASK = Task(id="t", prompt=(Message(role="user", content="?"),), answer="7")


def episode(member: int, reply: str, stop: StopReason = StopReason.FINISHED) -> Episode:
    return Episode(
        id=f"e0000-i000000.{member}",
        group="e0000-i000000",
        member=member,
        task_id="t",
        attempt=0,
        spans=(),
        stop=stop,
        messages=(Message(role="assistant", content=reply),) if reply else (),
        timings=Timings(generate_s=0.0),
    )


def graded_group(grader: FakeGrader, episodes: list[Episode]) -> Group:
    async def run() -> tuple[GradedEpisode, ...]:
        verdicts = await asyncio.gather(*(grade(grader, TASK, each, timeout_s=5.0) for each in episodes))
        return tuple(GradedEpisode(episode=each, verdict=got) for each, got in zip(episodes, verdicts, strict=True))

    draw = Draw(epoch=0, index=0, task_id="t", seed=0)
    return Group(draw=draw, members=asyncio.run(run()), admitted_version=0)


def test_five_of_eight_failed_in_reset_and_the_mean_is_of_three() -> None:
    finished = [episode(0, "7"), episode(1, "8"), episode(2, "9")]
    failed = [episode(member, "", StopReason.FAILED) for member in range(3, 8)]
    grader = FakeGrader()

    group = graded_group(grader, finished + failed)

    assert group.scores_G.tolist() == [1.0, 0.0, 0.0]
    assert group.scores_G.mean() == pytest.approx(0.333333, abs=1e-6)
    unscored = [member.verdict for member in group.members if isinstance(member.verdict, Unscored)]
    assert [verdict.reason for verdict in unscored] == ["environment"] * 5
    assert len(unscored) / len(group.members) == 0.625
    assert grader.num_calls == 3


def test_a_grader_that_fails_in_any_way_gives_no_number() -> None:
    outcomes: dict[int, object] = {1: RuntimeError("judge is down"), 2: None, 3: 0.0, 4: float("nan")}
    grader = FakeGrader(outcomes=outcomes)

    group = graded_group(grader, [episode(member, "7") for member in range(6)])

    assert group.scores_G.tolist() == [1.0, 1.0]
    assert [isinstance(member.verdict, Unscored) for member in group.members] == [False, True, True, True, True, False]
