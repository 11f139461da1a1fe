"""Looks after the parts that live in other processes: finds the dead, asks the policy, has them replaced.

    every health_s: engine? worker? --dead or silent--> policy --> replace | go on with fewer | stop the run

Runs beside whatever the run does, so that a death is named within seconds even while nobody waits for that part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fourstroke.config import RunConfig
from fourstroke.engines.fleet import Fleet
from fourstroke.errors import ActorDiedError, DeadlineError, EngineDiedError, FourstrokeError
from fourstroke.observability import EventKind, Waits
from fourstroke.orchestration.faults import first_cause
from fourstroke.orchestration.supervision import Action, Fault, FaultKind, Supervisor
from fourstroke.rollout import WorkerPool
from fourstroke.types import Engine, Wait, Worker


class Watch:
    """Watches engines and workers.

    Args:
        config: Read for deadlines.
        fleet: The engines.
        workers: The workers.
        supervisor: Decides.
        tell: Takes an event's kind and fields.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        fleet: Fleet,
        workers: WorkerPool,
        supervisor: Supervisor,
        tell: Callable[..., None],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._workers = workers
        self._supervisor = supervisor
        self._tell = tell
        self._waits = Waits("watch")
        self._at_work: set[str] = set()
        self._waits_of: dict[str, tuple[Wait, ...]] = {}
        self.step = 0

    def waits(self) -> tuple[Wait, ...]:
        """What the watched parts said that they wait for, and what is waited for here."""
        return (*self._waits.now(), *(wait for waits in self._waits_of.values() for wait in waits))

    async def run(self) -> None:
        """Watch until cancelled.

        Raises:
            FourstrokeError: A part died and the policy stops the run, or its replacement did not start.
        """
        with first_cause():
            await self._run()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as replacing:
            while True:
                # A group of its own: when the policy stops the run, no look goes on that could begin a replacement.
                async with asyncio.TaskGroup() as looks:
                    for engine in self._fleet.started:
                        looks.create_task(self._look_at_engine(engine, replacing))
                    for worker in self._workers.workers:
                        looks.create_task(self._look_at_worker(worker, replacing))
                await asyncio.sleep(self._config.deadlines.health_s)

    async def _look_at_engine(self, engine: Engine, replacing: asyncio.TaskGroup) -> None:
        if engine.name in self._at_work:
            return
        try:
            async with self._waits.within(self._config.deadlines.answer_s, f"{engine.name} to say that it lives"):
                await engine.check_health()
        except (EngineDiedError, DeadlineError) as error:
            others = len(self._fleet.routable) - (engine in self._fleet.routable)
            fault = self._fault(FaultKind.ENGINE_DIED, engine.name, num_others=others, error=error)
            self._start(replacing, fault, error, self._fleet.replace, self._fleet.forget)

    async def _look_at_worker(self, worker: Worker, replacing: asyncio.TaskGroup) -> None:
        if worker.name in self._at_work:
            return
        try:
            async with self._waits.within(self._config.deadlines.answer_s, f"{worker.name} to say that it lives"):
                self._waits_of[worker.name] = await worker.check_health()
        except (ActorDiedError, DeadlineError) as error:
            self._waits_of.pop(worker.name, None)
            others = len(self._workers.workers) - 1
            fault = self._fault(FaultKind.WORKER_DIED, worker.name, num_others=others, error=error)
            self._start(replacing, fault, error, self._workers.replace, self._workers.forget)

    def _fault(self, kind: FaultKind, name: str, *, num_others: int, error: FourstrokeError) -> Fault:
        self._tell(EventKind.FAULT, fault=kind.value, part=name, reason=str(error))
        return Fault(kind=kind, subject=name, step=self.step, num_others=num_others, reason=str(error))

    def _start(
        self,
        replacing: asyncio.TaskGroup,
        fault: Fault,
        error: FourstrokeError,
        replace: Callable[[str], Awaitable[Engine | Worker]],
        forget: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        """Do what the policy decides, without holding up the look at the others."""
        action = self._supervisor.decide(fault)
        if action is Action.STOP:
            raise error
        self._at_work.add(fault.subject)
        work = self._replace(fault.subject, replace) if action is Action.REPLACE else forget(fault.subject)
        replacing.create_task(work, name=f"replace {fault.subject}")

    async def _replace(self, name: str, replace: Callable[[str], Awaitable[Engine | Worker]]) -> None:
        async with self._waits.within(self._config.deadlines.start_s, f"the successor of {name} to start"):
            successor = await replace(name)
        self._tell(EventKind.PART_REPLACED, part=name, successor=successor.name)
