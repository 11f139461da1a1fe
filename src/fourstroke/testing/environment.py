"""Fakes of the environment and the grader, with scripted failures and latency on the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from typing import Any

from fourstroke.environments import task_of
from fourstroke.errors import FourstrokeError
from fourstroke.rewards import grade
from fourstroke.types import Episode, Grader, Message, Observation, Scored, Task, Verdict


class FakeEnvironmentError(FourstrokeError, ConnectionError):
    """The failure that a scripted reset raises."""


class FakeEnvironment:
    """One attempt at a fake task; made by :class:`FakeTaskset`."""

    def __init__(self, task: Task, *, taskset: FakeTaskset, number: int) -> None:
        self._task = task
        self._taskset = taskset
        self._number = number
        self._phase = "new"

    async def reset(self) -> Observation:
        """The task's prompt, after the taskset's latency.

        Raises:
            FakeEnvironmentError: The script has this environment fail.
        """
        assert self._phase == "new", self._phase
        await asyncio.sleep(self._taskset.latency_s)
        if self._number in self._taskset.failing:
            raise FakeEnvironmentError(f"environment {self._number} fails its reset, as scripted")
        self._phase = "open"
        return Observation(messages=self._task.prompt, is_final=False)

    async def step(self, reply: Message) -> Observation:
        """The end of the episode, after the taskset's latency."""
        assert self._phase == "open", (self._phase, reply)
        await asyncio.sleep(self._taskset.latency_s)
        self._phase = "over"
        return Observation(messages=(), is_final=True)

    async def close(self) -> None:
        """Count this environment as closed, once."""
        self._taskset.num_closed += self._phase != "closed"
        self._phase = "closed"


class FakeTaskset:
    """Tasks "Say train-0." with the answer "train-0", and the same for held-out ones.

    Args:
        num_train: Tasks to train on.
        num_held_out: Tasks to evaluate on.
        failing: Numbers of the environments, in the order of their opening from 0, whose reset raises.
        latency_s: Seconds that each reset and step take.

    Attributes:
        num_opened: Environments opened so far.
        num_closed: Environments closed so far.

    Example:
        >>> FakeTaskset().train[0].answer
        'train-0'
    """

    def __init__(
        self,
        *,
        num_train: int = 8,
        num_held_out: int = 4,
        failing: Container[int] = frozenset(),
        latency_s: float = 0.0,
    ) -> None:
        self.train = tuple(_task(f"train-{number}") for number in range(num_train))
        self.held_out = tuple(_task(f"held-out-{number}") for number in range(num_held_out))
        self.failing = failing
        self.latency_s = latency_s
        self.num_opened = 0
        self.num_closed = 0

    def open(self, task: Task, seed: int) -> FakeEnvironment:
        """A fresh environment, numbered by its opening."""
        del seed
        self.num_opened += 1
        return FakeEnvironment(task, taskset=self, number=self.num_opened - 1)


class FakeGrader:
    """Scores 1 where the reply is the answer, else 0, unless the script says otherwise.

    Args:
        outcomes: By member of a group: an exception is raised, anything else is returned as it is.
        latency_s: Seconds that each grading takes.

    Attributes:
        num_calls: Gradings begun so far.

    Example:
        >>> FakeGrader(outcomes={3: ZeroDivisionError("division by zero")}).name
        'fake@00000000'
    """

    name = "fake@00000000"

    def __init__(self, *, outcomes: Mapping[int, object] | None = None, latency_s: float = 0.0) -> None:
        self._outcomes = outcomes or {}
        self._latency_s = latency_s
        self.num_calls = 0

    async def grade(self, task: Task, episode: Episode) -> Any:
        """The scripted outcome, or the comparison's."""
        self.num_calls += 1
        await asyncio.sleep(self._latency_s)
        if episode.member in self._outcomes:
            outcome = self._outcomes[episode.member]
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        score = float(episode.reply == task.answer)
        return Scored(score=score, components={"equal": score}, reason="compared", grader=self.name, cost_s=0.0)


class InlineGraders:
    """Graders in the caller's process, for virtual time: what ``rewards.GraderPool`` is in processes of its own.

    Args:
        grader: The grader.
        timeout_s: Seconds for one episode.
    """

    def __init__(self, grader: Grader, *, timeout_s: float) -> None:
        self._grader = grader
        self._timeout_s = timeout_s

    async def start(self) -> None:
        """Nothing to start."""

    async def grade(self, task: Task, episode: Episode) -> Verdict:
        """The verdict, or why there is none."""
        return await grade(self._grader, task, episode, timeout_s=self._timeout_s)

    async def close(self) -> None:
        """Nothing to end."""


class ParityGrader:
    """Scores 1 where the number of sampled tokens plus the last id is even: a random model gets mixed groups too."""

    name = "parity@00000000"

    async def grade(self, task: Task, episode: Episode) -> Scored:
        """The parity of the reply."""
        del task
        ids = episode.spans[-1].ids
        score = float((len(ids) + int(ids[-1])) % 2 == 0)
        return Scored(score=score, components={"parity": score}, reason="parity", grader=self.name, cost_s=0.0)


def parity() -> ParityGrader:
    """For ``grader.use`` in runs of a tiny model."""
    return ParityGrader()


def _task(word: str) -> Task:
    return task_of((Message(role="user", content=f"Say {word}."),), answer=word)
