"""All rollout workers of a run: each assignment goes to the one with the least to do; a dead one can be replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from fourstroke.errors import ActorDiedError
from fourstroke.types import Assignment, Engine, GroupRecord, RefusedGroup, Worker


class WorkerPool:
    """The workers of one run.

    Args:
        make: Makes a worker, not started, from its name.
        count: Number of workers.

    Example:
        >>> pool = WorkerPool(make, count=1)  # doctest: +SKIP
        >>> await pool.start()  # doctest: +SKIP
        >>> (record,) = await pool.run([assignment], is_together=False)  # doctest: +SKIP
    """

    def __init__(self, make: Callable[[str], Worker], *, count: int) -> None:
        self._make = make
        self._workers = {name: make(name) for name in (f"worker-{number}" for number in range(count))}
        self._starting: dict[str, Worker] = {}
        self._num_made = count
        self._outstanding: Counter[str] = Counter()
        self._dead: set[str] = set()
        self._engines: Sequence[Engine] = ()
        self._is_there = asyncio.Event()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every worker that was not lost."""
        return tuple(self._workers.values())

    async def start(self) -> None:
        """Start all workers."""
        await asyncio.gather(*(worker.start() for worker in self.workers))
        self._note()
        await self.route(self._engines)

    async def route(self, engines: Sequence[Engine]) -> None:
        """From now on let all workers, and those that come later, sample on these engines alone."""
        self._engines = engines
        if self._is_there.is_set():
            await asyncio.gather(*(self._route(worker) for worker in self.workers))

    async def run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        """Have one worker sample, grade and store groups; waits while there is none.

        Raises:
            EngineDiedError: The engine died before it answered.
            ActorDiedError: The worker died before it answered.
        """
        await self._is_there.wait()
        name = min(self._living(), key=lambda name: self._outstanding[name])
        self._outstanding[name] += len(assignments)
        try:
            return await self._workers[name].run(assignments, is_together=is_together)
        except ActorDiedError:
            # Before whoever watches says so: names are never used again.
            self._dead.add(name)
            self._note()
            raise
        finally:
            self._outstanding[name] -= len(assignments)

    async def replace(self, name: str) -> Worker:
        """Start a worker in place of a dead one.

        Raises:
            ActorDiedError: It cannot start.
        """
        await self.forget(name)
        successor = self._make(f"worker-{self._num_made}")
        self._num_made += 1
        self._starting[successor.name] = successor
        await successor.start()
        routed: Sequence[Engine] | None = None
        while routed is not self._engines:
            # They may change while it is told.
            routed = self._engines
            await successor.route(routed)
        self._workers[successor.name] = self._starting.pop(successor.name)
        self._note()
        return successor

    async def forget(self, name: str) -> None:
        """Give nothing to a worker any more, and end what is left of it."""
        worker = self._workers.pop(name)
        self._note()
        await worker.close()

    async def close(self) -> None:
        """End all workers, those that are starting too. May be called twice."""
        await asyncio.gather(*(worker.close() for worker in (*self.workers, *self._starting.values())))

    def _living(self) -> list[str]:
        return [name for name in self._workers if name not in self._dead]

    def _note(self) -> None:
        if self._living():
            self._is_there.set()
        else:
            self._is_there.clear()

    async def _route(self, worker: Worker) -> None:
        # Whoever watches replaces a dead one, and its successor is told.
        with suppress(ActorDiedError):
            await worker.route(self._engines)
