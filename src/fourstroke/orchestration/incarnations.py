"""Trains a run to its last step through deaths: one incarnation of it after another, from the newest checkpoint.

    ledger, newest checkpoint --restore--> start --load, publish--> controller --> the last step is done
              ^                                                         |
              '------------- a new trainer <---- the trainer died ------'

A run that a person resumes and one that lost its trainer go on by this same path; so do the tests' simulated runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from fourstroke.config import RunConfig
from fourstroke.engines.fleet import Fleet, MakeEngine
from fourstroke.errors import ActorDiedError
from fourstroke.observability import Event, EventKind, Waits
from fourstroke.orchestration.canary import CanaryWatch
from fourstroke.orchestration.controller import Controller, Outlets, Parts, written
from fourstroke.orchestration.restore import restore
from fourstroke.orchestration.supervision import Action, Fault, FaultKind, Supervisor
from fourstroke.rollout import WorkerPool
from fourstroke.store import Ledger
from fourstroke.store.checkpoints import newest_checkpoint
from fourstroke.types import Task, Trainer, Worker


class Closable(Protocol):
    """A part that starts and ends."""

    async def start(self) -> None:
        """Be ready."""
        ...

    async def close(self) -> None:
        """End."""
        ...


@asynccontextmanager
async def started(*parts: Closable, waits: Waits, timeout_s: float) -> AsyncIterator[None]:
    """Parts started side by side, and all of them closed on the way out, those that failed to start too.

    Raises:
        FourstrokeError: What the first part to fail raised.
        DeadlineError: One of them took too long.
    """
    try:
        starting = [asyncio.create_task(part.start()) for part in parts]
        try:
            async with waits.within(timeout_s, "engines, trainer and workers to start"):
                await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        yield
    finally:
        await asyncio.gather(*(part.close() for part in parts))


class TrainerHolder:
    """The trainer of a run, which may be another one after a death."""

    def __init__(self, make: Callable[[], Trainer]) -> None:
        self._make = make
        self.part = make()

    async def start(self) -> None:
        """Start the trainer."""
        await self.part.start()

    async def replace(self) -> None:
        """Start a new trainer in place of a dead one."""
        await self.part.close()
        self.part = self._make()
        await self.part.start()

    async def close(self) -> None:
        """End the trainer. May be called twice."""
        await self.part.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """All that a run trains with, for as long as its driver lives."""

    fleet: Fleet
    canary: CanaryWatch
    workers: WorkerPool
    trainer: TrainerHolder
    ledger: Ledger
    supervisor: Supervisor


def assemble(
    config: RunConfig,
    *,
    ledger: Ledger,
    supervisor: Supervisor,
    make_engine: MakeEngine,
    make_worker: Callable[[str], Worker],
    make_trainer: Callable[[], Trainer],
) -> Crew:
    """The parts of a run, wired to each other and not yet started."""
    workers = WorkerPool(make_worker, count=config.rollout.num_workers)
    # The checkpoint that engines start from is the run's version 0 only until its first incarnation.
    is_fresh = ledger.incarnations() == ()
    canary = CanaryWatch(config)
    fleet = Fleet(
        make_engine, count=config.engine.count, is_fresh=is_fresh, on_routable=workers.route, prove=canary.prove
    )
    trainer = TrainerHolder(make_trainer)
    return Crew(fleet=fleet, canary=canary, workers=workers, trainer=trainer, ledger=ledger, supervisor=supervisor)


class Incarnations:
    """Drives incarnations until the last step is done or the policy stops the run.

    Args:
        config: The run's.
        tasks: Those to train on.
        crew: What it trains with; started.
        outlets: Where the controller tells of what it did.
        checkpoints_dir: Where checkpoints lie.
        waits: Where waits outside the controller are noted.
        note: Tells a person.
        at_step: Told of the step that each incarnation goes on from.

    Attributes:
        controller: That of the present incarnation, while there is one.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        tasks: Sequence[Task],
        crew: Crew,
        outlets: Outlets,
        checkpoints_dir: Path,
        waits: Waits,
        note: Callable[[str], None],
        at_step: Callable[[int], None] = lambda _step: None,
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._crew = crew
        self._outlets = replace(outlets, on_step=self._on_step)
        self._tell_step = outlets.on_step
        self._checkpoints_dir = checkpoints_dir
        self._waits = waits
        self._note = note
        self._at_step = at_step
        self._step = 0
        self.controller: Controller | None = None

    async def run(self) -> None:
        """Incarnation after incarnation.

        Raises:
            FourstrokeError: A fault that the policy does not survive; the run can be resumed.
        """
        reason = "the run began" if self._crew.ledger.incarnations() == () else "resumed"
        while True:
            try:
                await self.run_one(reason)
            except ActorDiedError as error:
                reason = str(error)
                await self._replace_trainer(error)
            else:
                return

    async def run_one(self, reason: str) -> None:
        """A single incarnation, begun for a reason.

        Raises:
            ActorDiedError: The trainer died, so that another incarnation must go on.
            FourstrokeError: A fault that the policy does not survive.
        """
        config, crew = self._config, self._crew
        is_first = crew.ledger.incarnations() == ()
        self._step = step = newest_checkpoint(self._checkpoints_dir)
        self._at_step(step)
        start = restore(crew.ledger, config, step=step, reason=reason)
        self._tell(EventKind.INCARNATION_OPENED, incarnation=start.incarnation, step=step, reason=reason)
        trainer, deadlines = crew.trainer.part, config.deadlines
        if not crew.fleet.has_published:
            await self._measure_floor()
        if step:
            async with self._waits.within(deadlines.start_s, f"the trainer to load the checkpoint of step {step}"):
                await trainer.load(str(self._outlets.checkpoint_path(step)))
        if not is_first:
            async with self._waits.within(deadlines.publish_s, f"the weights of step {step} to land"):
                await crew.fleet.publish(lambda: written(trainer, step, canary=crew.canary, start=start))
        parts = Parts(
            fleet=crew.fleet,
            canary=crew.canary,
            trainer=trainer,
            workers=crew.workers,
            ledger=crew.ledger,
            supervisor=crew.supervisor,
        )
        self.controller = Controller(config, tasks=self._tasks, parts=parts, outlets=self._outlets, start=start)
        try:
            await self.controller.run()
        finally:
            self.controller = None

    async def _measure_floor(self) -> None:
        """Trainer and engines have just loaded the model, and no publication: what they differ by is rounding."""
        async with self._waits.within(self._config.deadlines.start_s, "trainer and engines to score the canary"):
            await self._crew.canary.measure_floor(self._crew.trainer.part, self._crew.fleet.started)
        if self._crew.canary.is_off:
            self._note("the engine cannot score fixed tokens of this model: new weights are proved by digests alone")

    async def _replace_trainer(self, error: ActorDiedError) -> None:
        """A new trainer, or the error again where the policy stops the run."""
        fault = Fault(kind=FaultKind.TRAINER_DIED, subject="trainer", step=self._step, num_others=0, reason=str(error))
        self._tell(EventKind.FAULT, fault=fault.kind.value, part="trainer", reason=str(error))
        if self._crew.supervisor.decide(fault) is not Action.REPLACE:
            raise error
        self._note(f"{error}; going on from the newest checkpoint")
        async with self._waits.within(self._config.deadlines.start_s, "a new trainer to start"):
            await self._crew.fleet.withdraw()
            await self._crew.trainer.replace()
        self._tell(EventKind.PART_REPLACED, part="trainer", successor="trainer")

    def _on_step(self, step: int, record: dict[str, float]) -> None:
        self._step = step
        self._tell_step(step, record)

    def _tell(self, kind: EventKind, **fields: str | int | float) -> None:
        time_s = asyncio.get_running_loop().time() - self._outlets.origin_s
        self._outlets.on_event(Event(kind=kind, time_s=time_s, fields=fields))
