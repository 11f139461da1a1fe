"""The single-turn environment: it shows a task's prompt, and one reply ends the episode. It does not grade."""

from __future__ import annotations

from collections.abc import Iterable

from fourstroke.environments.split import split
from fourstroke.errors import ConfigError
from fourstroke.types import Message, Observation, Task


class SingleTurnEnvironment:
    """One attempt at one task. Single-use: ``reset`` once, ``step`` once, ``close`` any number of times.

    Example:
        >>> import asyncio
        >>> task = Task(id="9f2c", prompt=(Message(role="user", content="What is 3 + 4?"),), answer="7")
        >>> asyncio.run(SingleTurnEnvironment(task).reset()).messages[0].content
        'What is 3 + 4?'
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._phase = "new"

    async def reset(self) -> Observation:
        """The task's prompt."""
        assert self._phase == "new", f"reset of an environment that is {self._phase} (task {self._task.id})"
        self._phase = "open"
        return Observation(messages=self._task.prompt, is_final=False)

    async def step(self, reply: Message) -> Observation:
        """The end of the episode: no further messages."""
        assert self._phase == "open", f"step of an environment that is {self._phase} (task {self._task.id})"
        assert reply.role == "assistant", f"a reply has the role 'assistant', not {reply.role!r} (task {self._task.id})"
        self._phase = "over"
        return Observation(messages=(), is_final=True)

    async def close(self) -> None:
        """Nothing is held, so nothing is given back."""
        self._phase = "closed"


class SingleTurnTaskset:
    """Distinct tasks, split by a hash of their content; each attempt gets a :class:`SingleTurnEnvironment`.

    Args:
        tasks: Any tasks; those of equal content become one.
        held_out_fraction: Share of prompts on the held-out side, about.

    Raises:
        ConfigError: The fraction is no share, or leaves one side empty.

    Example:
        >>> from fourstroke.environments.split import task_of
        >>> tasks = [task_of((Message(role="user", content=f"What is {a} + 1?"),), answer=str(a + 1)) for a in range(9)]
        >>> taskset = SingleTurnTaskset(tasks, held_out_fraction=0.5)
        >>> len(taskset.train) + len(taskset.held_out)
        9
    """

    def __init__(self, tasks: Iterable[Task], *, held_out_fraction: float) -> None:
        self.train, self.held_out = split(tasks, fraction=held_out_fraction)
        num_tasks = len(self.train) + len(self.held_out)
        for side, members in (("train on", self.train), ("hold out", self.held_out)):
            if not members:
                raise ConfigError(
                    f"held_out_fraction = {held_out_fraction!r} leaves none of {num_tasks} distinct tasks to {side}; "
                    "change it, or ask for more tasks"
                )

    def open(self, task: Task, seed: int) -> SingleTurnEnvironment:
        """A fresh environment. A fixed prompt has no chance in it, so the seed changes nothing."""
        del seed
        return SingleTurnEnvironment(task)
