"""Which worker grades which episode, when its clock starts, and what becomes of it where the worker fails.

    grade(task, episode) -> waits its turn -> a worker that is idle -> Verdict
                            (no clock)        |  clock starts            timeout_s: worker killed, Unscored("timeout")
                                              '- started first, where    worker died:             Unscored("crashed")
                                                 its process is gone

Invariants: episodes begin in the order in which they came; a worker has one episode at a time; each call gets exactly
one verdict, and an answer that is here when the deadline is noticed counts; a worker that did not answer as it should
is killed before anything else reaches it, so that no late answer can be taken for another's; one worker's end disturbs
no other. May not know what a worker is: processes stand in ``process``, fakes in the tests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from fourstroke.errors import ActorDiedError, FourstrokeError, GradingError
from fourstroke.types import Episode, Task, Unscored, Verdict

MAX_STARTS = 3


class Worker(Protocol):
    """A place for a killable process that grades; the process behind it may be replaced."""

    @property
    def is_running(self) -> bool:
        """Whether there is a process that can take an episode."""
        ...

    @property
    def grader_name(self) -> str:
        """Name of the grader, known once a process was started."""
        ...

    async def start(self) -> None:
        """Start a process.

        Raises:
            ConfigError: It cannot be made to work; another try would fail too.
            ActorDiedError: The process died before it was ready.
        """
        ...

    async def grade(self, task: Task, episode: Episode) -> Verdict:
        """The process's verdict.

        Raises:
            ActorDiedError: The process died, or sent something else.
        """
        ...

    async def kill(self) -> None:
        """End the process and all that it started, now. May be called twice, and of a process that is not there."""
        ...

    async def close(self) -> None:
        """Let the process end by itself, then kill it."""
        ...


class Dispatcher:
    """Hands episodes to workers, in order, and never raises for what a grader does.

    Args:
        workers: Not yet started.
        timeout_s: Seconds of the event loop's clock for one episode, from when a worker begins it.
        start_timeout_s: Seconds for a worker to become ready.
    """

    def __init__(self, workers: Sequence[Worker], *, timeout_s: float, start_timeout_s: float) -> None:
        assert workers, "no worker"
        self._workers = tuple(workers)
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._idle = deque(self._workers)
        self._turn = asyncio.Semaphore(len(self._workers))
        self._is_closed = False

    @property
    def grader_name(self) -> str:
        """Name of the grader that the workers run; known after ``start``."""
        return self._workers[0].grader_name

    async def start(self) -> None:
        """Start all workers, side by side; where one fails, none is left.

        Raises:
            ConfigError: The grader cannot be imported or made.
            GradingError: A process died so often, or took so long, before it was ready.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            try:
                async with asyncio.TaskGroup() as group:
                    for worker in self._workers:
                        group.create_task(self._start(worker))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            stack.pop_all()

    async def grade(self, task: Task, episode: Episode) -> Verdict:
        """The verdict, once a worker had time for the episode.

        Returns:
            What the worker answered, or ``Unscored`` with the reason ``timeout``, ``crashed``, or ``aborted`` where
            ``close`` came first. A caller that is cancelled takes the worker's process along.
        """
        loop = asyncio.get_running_loop()
        async with self._idle_worker() as worker:
            began = loop.time()
            try:
                if not self._is_closed:
                    if not worker.is_running:
                        await self._start(worker)
                        began = loop.time()
                    return await self._judge(worker, task, episode)
            except FourstrokeError as error:
                if not self._is_closed:
                    return self._unscored("crashed", f"on episode {episode.id}: {error}", cost_s=loop.time() - began)
            return self._unscored("aborted", f"graders were closed before episode {episode.id} was graded", cost_s=0.0)

    async def close(self) -> None:
        """End all workers; whoever still waits gets its ``Unscored``. May be called twice."""
        self._is_closed = True
        await asyncio.gather(*(each.close() if each in self._idle else each.kill() for each in self._workers))

    @asynccontextmanager
    async def _idle_worker(self) -> AsyncIterator[Worker]:
        async with self._turn:
            # One that has to be started first makes an episode wait.
            worker = next((each for each in self._idle if each.is_running), self._idle[0])
            self._idle.remove(worker)
            try:
                yield worker
            finally:
                self._idle.append(worker)

    async def _judge(self, worker: Worker, task: Task, episode: Episode) -> Verdict:
        """The worker's verdict, or ``timeout``; raises ``ActorDiedError`` where it died."""
        async with AsyncExitStack() as unless_answered:
            unless_answered.push_async_callback(worker.kill)
            answer = asyncio.create_task(worker.grade(task, episode))
            unless_answered.callback(answer.cancel)
            # Unlike asyncio.timeout, this leaves an answer alone that came while the loop was held up.
            await asyncio.wait({answer}, timeout=self._timeout_s)
            if answer.done():
                verdict = answer.result()
                unless_answered.pop_all()
                return verdict
        detail = f"grader {self.grader_name} ran past {self._timeout_s} s on episode {episode.id} and was killed"
        return self._unscored("timeout", detail, cost_s=self._timeout_s)

    async def _start(self, worker: Worker) -> None:
        """Start a worker, with as many tries as a process that dies at once may have."""
        fault = ""
        for _ in range(MAX_STARTS):
            async with AsyncExitStack() as unless_ready:
                unless_ready.push_async_callback(worker.kill)
                try:
                    async with asyncio.timeout(self._start_timeout_s):
                        await worker.start()
                except ActorDiedError as error:
                    fault = str(error)
                except TimeoutError as error:
                    text = f"grader.use: its process was not ready within {self._start_timeout_s} s"
                    raise GradingError(text) from error
                else:
                    unless_ready.pop_all()
                    return
            if self._is_closed:
                raise GradingError("graders were closed while a process started")
        raise GradingError(f"{fault}; so it went {MAX_STARTS} times in a row")

    def _unscored(self, reason: str, detail: str, *, cost_s: float) -> Unscored:
        return Unscored(reason=reason, detail=detail, grader=self.grader_name, cost_s=cost_s)
