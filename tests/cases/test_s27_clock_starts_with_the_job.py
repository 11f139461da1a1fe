"""S27: eight scorings of 40 ms on two workers with a timeout of 100 ms: the clock starts with a job, and all score.

A clock that starts when a job is handed in gives up the third and fourth wave, half of the right answers.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from fourstroke.config import GraderConfig
from fourstroke.rewards import GraderPool, grade
from fourstroke.rewards.dispatch import Dispatcher
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.environment import FakeGrader
from fourstroke.types import Episode, Message, Scored, StopReason, Task, Timings, Verdict

TASK = Task(id="t", prompt=(Message(role="user", content="?"),), answer="7")
EPISODES = [
    Episode(
        id=f"g.{member}",
        group="g",
        member=member,
        task_id="t",
        attempt=0,
        spans=(),
        stop=StopReason.FINISHED,
        messages=(Message(role="assistant", content="7"),),
        timings=Timings(generate_s=0.0),
    )
    for member in range(8)
]


class InProcessWorker:
    """A grader that takes 40 ms, where a process would be."""

    is_running = False
    grader_name = FakeGrader.name

    async def start(self) -> None:
        self.is_running = True
        self._grader = FakeGrader(latency_s=0.04)

    async def grade(self, task: Task, episode: Episode) -> Verdict:
        return await grade(self._grader, task, episode, timeout_s=None)

    async def kill(self) -> None:
        self.is_running = False

    async def close(self) -> None:
        self.is_running = False


def test_eight_of_eight_are_scored_in_four_waves() -> None:
    async def run() -> tuple[list[Verdict], float]:
        queue = Dispatcher([InProcessWorker(), InProcessWorker()], timeout_s=0.1, start_timeout_s=1.0)
        await queue.start()
        verdicts = await asyncio.gather(*(queue.grade(TASK, episode) for episode in EPISODES))
        return verdicts, asyncio.get_running_loop().time()

    verdicts, ended_s = run_virtual(run())

    assert [verdict.score for verdict in verdicts if isinstance(verdict, Scored)] == [1.0] * 8
    assert ended_s == pytest.approx(0.160)  # later than the timeout: a clock from the call would have fired


_COUNTING = """
from fourstroke.types import Scored

class Counting:
    name = "counting@00000000"

    async def grade(self, task, episode):
        return Scored(score=float(sum(range(300_000)) > 0), components={}, reason="", grader=self.name, cost_s=0.0)
"""


def test_eight_of_eight_that_never_await_are_scored_by_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counting_grader.py").write_text(_COUNTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = GraderConfig(use="counting_grader:Counting", num_processes=2)

    async def run() -> list[Verdict]:
        pool = GraderPool(config, timeout_s=60.0, environment=dict(os.environ), log_path=tmp_path / "graders.log")
        await pool.start()
        try:
            return await asyncio.gather(*(pool.grade(TASK, episode) for episode in EPISODES))
        finally:
            await pool.close()

    assert "counting_grader" not in sys.modules  # it is imported where it runs, and nowhere else
    assert [type(verdict) for verdict in asyncio.run(run())] == [Scored] * 8
    assert "counting_grader" not in sys.modules
