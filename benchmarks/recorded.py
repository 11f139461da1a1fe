"""Recorded work for timing: fixed tasks, scores by a table, and a gate before each step. Used by ``vs_trl.py``.

A run trains on all tasks in each step. The first environment of a step that is opened says so, and all of them wait
until the step is let through, so that another program can have the machine in the meantime:

    this process   reset of step k -> writes `arrived` -> waits for `permitted` >= k -> the step
    the driver     reads `arrived`  -> runs the other program's step -> writes `permitted`
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fourstroke.types import Episode, Message, Observation, Scored, Task

_POLL_S = 0.05


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained on.

    Attributes:
        system: Text of the system message before each prompt.
        prompts: Text of each task.
        scores: Of each kind of step, in turn, the score of each member of each task: [kinds][tasks][members].
    """

    system: str
    prompts: list[str]
    scores: list[list[list[float]]]

    def messages(self, prompt: str) -> tuple[Message, ...]:
        """A task's messages."""
        return (Message(role="system", content=self.system), Message(role="user", content=prompt))


def read_work(path: str) -> Work:
    """The work in a JSON file."""
    return msgspec.json.decode(Path(path).read_bytes(), type=Work)


class RecordedTaskset:
    """All tasks are trained on; none is held out."""

    def __init__(self, work: Work, *, gate: Path) -> None:
        self.train: Sequence[Task] = tuple(
            Task(id=task_id(index), prompt=work.messages(prompt), answer=str(index))
            for index, prompt in enumerate(work.prompts)
        )
        self.held_out: Sequence[Task] = ()
        self._gate = gate
        self._num_members = len(work.scores[0][0])
        self._num_opened: Counter[str] = Counter()

    def open(self, task: Task, seed: int) -> GatedEnvironment:
        """An attempt; which step it belongs to follows from how often the task was opened before."""
        del seed
        step = self._num_opened[task.id] // self._num_members
        self._num_opened[task.id] += 1
        return GatedEnvironment(task, step=step, gate=self._gate)


class GatedEnvironment:
    """Shows the prompt once the step is let through; one reply ends the episode."""

    def __init__(self, task: Task, *, step: int, gate: Path) -> None:
        self._task, self._step, self._gate = task, step, gate

    async def reset(self) -> Observation:
        """The prompt."""
        arrived = self._gate / f"arrived-{self._step}"
        if not arrived.exists():
            write(arrived, time.monotonic())
        permitted = self._gate / f"permitted-{self._step}"
        while not permitted.exists():  # noqa: ASYNC110 (another process makes it)
            await asyncio.sleep(_POLL_S)
        began = self._gate / f"began-{self._step}"
        if not began.exists():
            write(began, time.monotonic())
        return Observation(messages=self._task.prompt, is_final=False)

    async def step(self, reply: Message) -> Observation:
        """The end."""
        del reply
        return Observation(messages=(), is_final=True)

    async def close(self) -> None:
        """Nothing is held."""


class RecordedGrader:
    """Scores by the table, whatever the reply."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._num_graded: Counter[tuple[str, int]] = Counter()

    @property
    def name(self) -> str:
        """Name and a digest of the table."""
        return f"recorded@{hashlib.sha256(msgspec.json.encode(self._work)).hexdigest()[:8]}"

    async def grade(self, task: Task, episode: Episode) -> Scored:
        """The member's score in the present kind of step."""
        step = self._num_graded[task.id, episode.member]
        self._num_graded[task.id, episode.member] += 1
        assert task.answer is not None
        score = self._work.scores[step % len(self._work.scores)][int(task.answer)][episode.member]
        return Scored(score=score, components={}, reason="recorded", grader=self.name, cost_s=0.0)


def task_id(index: int) -> str:
    """Name of a task."""
    return f"recorded-{index:03d}"


def tasks(*, work: str, gate: str) -> RecordedTaskset:
    """For ``tasks.use``."""
    return RecordedTaskset(read_work(work), gate=Path(gate))


def grader(*, work: str) -> RecordedGrader:
    """For ``grader.use``."""
    return RecordedGrader(read_work(work))


def write(path: Path, value: float) -> None:
    """A file that is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)
