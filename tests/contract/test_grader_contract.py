"""What every grader must do; run on the fake and on the real ones, hostile replies included."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from fourstroke.environments import arithmetic, reasoning_gym, reasoning_gym_grader
from fourstroke.rewards import exact, grade, numeric
from fourstroke.testing.environment import FakeGrader, FakeTaskset
from fourstroke.types import (
    Episode,
    GradedEpisode,
    Grader,
    Message,
    Scored,
    StopReason,
    Task,
    Taskset,
    Timings,
    Verdict,
    decode,
    encode,
)

DATASETS = ("chain_sum", "spell_backward", "number_sorting", "word_sorting")


def gym(name: str) -> tuple[Grader, Taskset]:
    pytest.importorskip("reasoning_gym")
    return reasoning_gym_grader(name=name, size=20), reasoning_gym(name=name, size=20)


GRADERS: dict[str, Callable[[], tuple[Grader, Taskset]]] = {
    "fake": lambda: (FakeGrader(), FakeTaskset()),
    "exact": lambda: (exact(), arithmetic()),
    "numeric": lambda: (numeric(), arithmetic()),
    **{f"reasoning_gym.{name}": lambda name=name: gym(name) for name in DATASETS},  # type: ignore[misc]
}

HOSTILE = {
    "digits": "9" * 1_000_000,
    "nul": "\0" * 5,
    "right to left": "\u202e7\u202c",
    "lone surrogate": "\ud8007\udfff",
    "exponent": "1e999999999",
    "nested": "(" * 50_000 + "1" + ")" * 50_000,
    "nan": "nan",
    "infinity": "-Infinity",
    "code": "__import__('os')._exit(3)",
    "ten megabytes": "1,234.5e-" * 1_000_000,
    "deep lists": "[" * 5_000,
    "long number": "9" * 400,
    "format": "{0.__class__} %s %n",
}


@pytest.fixture(params=sorted(GRADERS))
def graded(request: pytest.FixtureRequest) -> tuple[Grader, Taskset]:
    return GRADERS[request.param]()


def judge(grader: Grader, task: Task, reply: str) -> Verdict:
    episode = Episode(
        id="g.0",
        group="g",
        member=0,
        task_id=task.id,
        attempt=0,
        spans=(),
        stop=StopReason.FINISHED,
        messages=(Message(role="assistant", content=reply),),
        timings=Timings(generate_s=0.0),
    )
    verdict = asyncio.run(grade(grader, task, episode, timeout_s=60.0))
    # Whatever the reply was, the verdict can be stored (the reply itself is kept out of this).
    kept = GradedEpisode(episode=msgspec.structs.replace(episode, messages=()), verdict=verdict)
    assert decode(encode(kept), GradedEpisode).verdict == verdict
    return verdict


def test_every_gold_answer_scores_one(graded: tuple[Grader, Taskset]) -> None:
    grader, taskset = graded
    for task in (*taskset.train[:30], *taskset.held_out[:30]):
        verdict = judge(grader, task, task.answer)
        assert isinstance(verdict, Scored)
        assert verdict.score == 1.0
        assert verdict.components
        assert verdict.grader == grader.name


def test_an_empty_reply_and_no_reply_score_zero(graded: tuple[Grader, Taskset]) -> None:
    grader, taskset = graded
    verdict = judge(grader, taskset.train[0], "")
    assert isinstance(verdict, Scored)
    assert verdict.score == 0.0


def test_the_name_is_stable_and_holds_a_digest(request: pytest.FixtureRequest, graded: tuple[Grader, Taskset]) -> None:
    again, _ = GRADERS[request.node.callspec.params["graded"]]()

    name, _, digest = graded[0].name.partition("@")
    assert graded[0].name == again.name
    assert name
    assert len(digest) == 8
    assert int(digest, 16) >= 0


@pytest.mark.parametrize("attack", sorted(HOSTILE))
def test_a_hostile_reply_gets_a_low_score(graded: tuple[Grader, Taskset], attack: str) -> None:
    grader, taskset = graded
    task = next(task for task in taskset.train if task.answer != "7")

    verdict = judge(grader, task, HOSTILE[attack])

    assert isinstance(verdict, Scored)
    assert verdict.score < 0.5


def test_grading_twice_gives_the_same_score(graded: tuple[Grader, Taskset]) -> None:
    grader, taskset = graded
    first, second = (judge(grader, taskset.train[0], f"maybe {taskset.train[0].answer}") for _ in range(2))
    assert isinstance(first, Scored)
    assert isinstance(second, Scored)
    assert first.score == second.score
