"""Evaluation over a fake runner: what is in a mean and what is only counted, seeds, progress, failure."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fourstroke.config import RunConfig, load_config
from fourstroke.errors import DataError, EngineDiedError
from fourstroke.evaluation import evaluate
from fourstroke.testing.environment import FakeTaskset
from fourstroke.types import (
    Draw,
    Episode,
    GradedEpisode,
    Group,
    MaskReason,
    Message,
    Scored,
    Span,
    StopReason,
    Tamper,
    Task,
    Timings,
    Unscored,
    Verdict,
    VersionRun,
)


def scored(score: float) -> Scored:
    return Scored(score=score, components={}, reason="", grader="g@0", cost_s=0.0)


UNSCORED = Unscored(reason="error", detail="boom", grader="g@0", cost_s=0.0)
TAMPER = Tamper(reason="wrote", grader="g@0", cost_s=0.0)
Outcome = tuple[Verdict, StopReason, int]


def done(score: float, *, num_tokens: int = 3) -> Outcome:
    return scored(score), StopReason.FINISHED, num_tokens


class FakeRunner:
    def __init__(self, outcomes: Callable[[int], list[Outcome]]) -> None:
        self.outcomes = outcomes
        self.draws: list[Draw] = []
        self.versions: set[int] = set()
        self.num_cancelled = 0

    async def run(self, draw: Draw, task: Task, *, num_samples: int, admitted_version: int) -> Group:
        self.draws.append(draw)
        self.versions.add(admitted_version)
        try:
            await asyncio.sleep(0.001 * (5 - draw.index % 5))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        outcomes = self.outcomes(draw.index)
        assert len(outcomes) == num_samples
        members = tuple(self._member(draw, task, number, outcome) for number, outcome in enumerate(outcomes))
        return Group(draw=draw, members=members, admitted_version=admitted_version)

    def _member(self, draw: Draw, task: Task, number: int, outcome: Outcome) -> GradedEpisode:
        verdict, stop, num_tokens = outcome
        span = Span(
            parent=-1,
            ids=np.zeros(num_tokens, np.int32),
            logprobs=np.zeros(num_tokens, np.float32),
            reason=MaskReason.SAMPLED,
            versions=(VersionRun(version=0, num_tokens=num_tokens),),
            engine="fake",
        )
        episode = Episode(
            id=f"{draw.key}.{number}",
            group=draw.key,
            member=number,
            task_id=task.id,
            attempt=0,
            spans=(span,),
            stop=stop,
            messages=(Message(role="assistant", content=""),),
            timings=Timings(generate_s=0.0),
        )
        return GradedEpisode(episode=episode, verdict=verdict)


def config_of(**values: Any) -> RunConfig:
    return load_config({"evaluation": {"samples_per_task": 2, **values}})


def run(runner: FakeRunner, config: RunConfig, *, num_tasks: int = 4, **named: Any) -> Any:
    tasks = FakeTaskset(num_held_out=num_tasks).held_out
    return asyncio.run(evaluate(tasks, name="before", runner=runner, config=config, version=5, **named))


def test_means_leave_out_what_has_no_score_and_the_report_counts_it() -> None:
    table: list[list[Outcome]] = [
        [done(1.0), done(1.0)],
        [done(0.0), (UNSCORED, StopReason.FINISHED, 3)],
        [(scored(1.0), StopReason.LENGTH, 11), (TAMPER, StopReason.FINISHED, 3)],
        [(UNSCORED, StopReason.FAILED, 0), (UNSCORED, StopReason.FAILED, 0)],
    ]

    report = run(FakeRunner(lambda index: table[index]), config_of(pass_at=[1, 2]))

    assert report.estimate.mean == pytest.approx(2 / 3)
    assert (report.estimate.num_tasks, report.estimate.num_samples) == (3, 4)
    assert report.pass_at == {1: pytest.approx(2 / 3), 2: 1.0}  # only the first task has two scored episodes
    assert report.num_tasks_without_score == 1
    assert (report.num_unscored, report.num_tampered, report.num_failed, report.num_truncated) == (3, 1, 2, 1)
    assert report.mean_tokens == pytest.approx((3 + 3 + 3 + 3 + 11 + 3) / 6)
    assert (report.name, report.version) == ("before", 5)
    assert report.seconds > 0


def test_a_k_that_no_task_allows_is_absent() -> None:
    outcomes = [done(1.0), (UNSCORED, StopReason.FINISHED, 3)]

    report = run(FakeRunner(lambda _index: outcomes), config_of(pass_at=[1, 2]))

    assert report.pass_at == {1: 1.0}


def test_draws_are_outside_the_ledger_and_their_seeds_belong_to_the_tasks() -> None:
    first, second, other = (FakeRunner(lambda index: [done(index % 2), done(1.0)]) for _ in range(3))

    run(first, config_of())
    run(second, config_of())
    run(other, load_config(config_of(), overrides=["seed=1"]))

    assert {draw.epoch for draw in first.draws} == {-1}
    assert first.versions == {5}
    assert first.draws == second.draws
    assert len({draw.seed for draw in first.draws + other.draws}) == 8
    assert all(0 <= draw.seed < 2**31 for draw in first.draws)


def test_the_number_of_tasks_and_progress() -> None:
    seen: list[tuple[int, int]] = []
    runner = FakeRunner(lambda index: [done(index % 2), done(1.0)])

    run(runner, config_of(num_tasks=3), num_tasks=9, on_task=lambda *counts: seen.append(counts))

    assert [draw.index for draw in runner.draws] == [0, 1, 2]
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_no_score_at_all_is_an_error_with_the_first_cause() -> None:
    with pytest.raises(DataError, match="error: boom"):
        run(FakeRunner(lambda _index: [(UNSCORED, StopReason.FINISHED, 3)] * 2), config_of())


def test_a_runner_that_raises_ends_the_evaluation_and_cancels_the_rest() -> None:
    def outcomes(index: int) -> list[Outcome]:
        if index == 4:
            raise EngineDiedError("vllm-0 died")
        return [done(1.0)] * 2

    runner = FakeRunner(outcomes)
    with pytest.raises(EngineDiedError, match="vllm-0 died"):
        run(runner, config_of(), num_tasks=5)
    assert runner.num_cancelled >= 1
