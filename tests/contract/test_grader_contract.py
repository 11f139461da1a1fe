"""What every grader must do; run on the fake and on the real ones, hostile replies included."""

import asyncio
import os
from collections.abc import Callable, Iterator

import msgspec
import pytest

from fourstroke.config import GraderConfig
from fourstroke.environments import arithmetic, reasoning_gym, reasoning_gym_grader
from fourstroke.rewards import GraderPool, exact, grade, numeric
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


POOLS = {"pool.numeric": "fourstroke.rewards.verifiers:numeric", "pool.exact": "fourstroke.rewards.verifiers:exact"}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all, since a pool belongs to the loop that it was started in."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def pools(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, GraderPool]]:
    """Graders in processes."""
    log_path = tmp_path_factory.mktemp("pools") / "graders.log"
    pools = {
        name: GraderPool(GraderConfig(use=use), timeout_s=60.0, environment=dict(os.environ), log_path=log_path)
        for name, use in POOLS.items()
    }
    for pool in pools.values():
        runner.run(pool.start())
    yield pools
    for pool in pools.values():
        runner.run(pool.close())


@pytest.fixture(params=sorted([*GRADERS, *POOLS]))
def graded(request: pytest.FixtureRequest, pools: dict[str, GraderPool]) -> tuple[Grader, Taskset]:
    return (pools[request.param], arithmetic()) if request.param in POOLS else GRADERS[request.param]()


def judge(runner: asyncio.Runner, grader: Grader, task: Task, reply: str) -> Verdict:
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
    verdict = runner.run(grade(grader, task, episode, timeout_s=60.0))
    # Whatever the reply was, the verdict can be stored (the reply itself is kept out of this).
    kept = GradedEpisode(episode=msgspec.structs.replace(episode, messages=()), verdict=verdict)
    assert decode(encode(kept), GradedEpisode).verdict == verdict
    return verdict


def test_every_gold_answer_scores_one(runner: asyncio.Runner, graded: tuple[Grader, Taskset]) -> None:
    grader, taskset = graded
    for task in (*taskset.train[:30], *taskset.held_out[:30]):
        verdict = judge(runner, grader, task, task.answer)
        assert isinstance(verdict, Scored)
        assert verdict.score == 1.0
        assert verdict.components
        assert verdict.grader == grader.name


def test_an_empty_reply_and_no_reply_score_zero(runner: asyncio.Runner, graded: tuple[Grader, Taskset]) -> None:
    grader, taskset = graded
    verdict = judge(runner, grader, taskset.train[0], "")
    assert isinstance(verdict, Scored)
    assert verdict.score == 0.0


def test_the_name_is_stable_and_holds_a_digest(request: pytest.FixtureRequest, graded: tuple[Grader, Taskset]) -> None:
    kind = request.node.callspec.params["graded"]
    again, _ = GRADERS[kind.removeprefix("pool.")]()

    name, _, digest = graded[0].name.partition("@")
    assert graded[0].name == again.name
    assert name
    assert len(digest) == 8
    assert int(digest, 16) >= 0


@pytest.mark.parametrize("attack", sorted(HOSTILE))
def test_a_hostile_reply_gets_a_low_score(runner: asyncio.Runner, graded: tuple[Grader, Taskset], attack: str) -> None:
    grader, taskset = graded
    task = next(task for task in taskset.train if task.answer != "7")

    verdict = judge(runner, grader, task, HOSTILE[attack])

    assert isinstance(verdict, Scored)
    assert verdict.score < 0.5


def test_grading_twice_gives_the_same_score(runner: asyncio.Runner, graded: tuple[Grader, Taskset]) -> None:
    grader, taskset = graded
    first, second = (judge(runner, grader, taskset.train[0], f"maybe {taskset.train[0].answer}") for _ in range(2))
    assert isinstance(first, Scored)
    assert isinstance(second, Scored)
    assert first.score == second.score
