"""A deterministic simulation of the control plane: a seed decides a run's shape, its latencies and every fault.

    seed --> scenario --> life 0 (a driver) --killed, or stopped with a sentence--> life 1 ... --> the last step is done
                            real: controller, buffer, slots, rolling, supervision, watch, fleet, pool, router, ledger
                            fake: engines, workers, trainer, behind a network with faults, in virtual time

A driver that is killed takes its processes along; what its code still does while it is swept away reaches nothing, as
after SIGKILL. A driver that stops with an error of our tree is resumed as a person would. A stop needs a fault of its
own life; without one it is a failure, as is any other error, and a run that makes no headway.

What must hold is checked at each transaction of the ledger, at each token that an engine samples, at each step, at each
death and at the end (``checks``). The same seed gives the same trace, so a failing seed is the whole report of a bug.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fourstroke.config import RunConfig, load_config
from fourstroke.engines.fleet import Fleet
from fourstroke.errors import ActorDiedError, DeadlineError, EngineDiedError, TooManyDropsError
from fourstroke.observability import Event, EventKind, Waits
from fourstroke.orchestration.controller import Outlets
from fourstroke.orchestration.faults import work_under_watch
from fourstroke.orchestration.incarnations import Crew, Incarnations, assemble, started
from fourstroke.orchestration.supervision import Supervisor
from fourstroke.orchestration.watch import Watch
from fourstroke.store.checkpoints import checkpoint_path, retain
from fourstroke.testing.checks import SimulatedLedger, Witness, faults_of_a_finished_run, faults_of_the_folder
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.network import Fate, FaultPlan, Network
from fourstroke.testing.simulated import Latencies, SimulatedEngine, SimulatedTrainer, SimulatedWorker, Surroundings
from fourstroke.types import GroupRecord, SampleRequest, Task, WeightVersion

# Errors with which a run may stop when a part fails it. Any other says that the control plane went wrong.
_STOPS = (ActorDiedError, EngineDiedError, DeadlineError, TooManyDropsError)
# Virtual seconds without a step, a fault or a new life after which a run is said to stand still.
_STILL_S = 400.0
_LOOK_S = 20.0
# Of the steps, those after which a result of long ago arrives once more.
_GHOSTS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a seed decides before the run begins.

    Attributes:
        config: The run's.
        latencies: How long things take.
        num_tasks: Tasks to train on.
        refused: Ids of those that do not fit.
        unscored: Probability that an episode gets no score.
        plan: The faults.
    """

    config: RunConfig
    latencies: Latencies
    num_tasks: int
    refused: frozenset[str]
    unscored: float
    plan: FaultPlan

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks."""
        return tuple(Task(id=f"task-{number}", prompt=(), answer="") for number in range(self.num_tasks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a simulated run went.

    Attributes:
        seed: Its seed.
        failures: What did not hold; empty if all did.
        trace: Digest of every message, event, step and ledger, with their times.
        faults: Each fault that was injected.
        stops: Sentences with which drivers stopped.
        num_kills: Drivers that were killed.
        num_messages: Messages carried.
        seconds: Virtual seconds.
    """

    seed: int
    failures: tuple[str, ...]
    trace: str
    faults: tuple[str, ...]
    stops: tuple[str, ...]
    num_kills: int
    num_messages: int
    seconds: float


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed.

    Example:
        >>> scenario_of(3).config.rollout.groups_per_step == scenario_of(3).config.rollout.groups_per_step
        True
    """
    random = Random(seed)  # noqa: S311 - no secret
    staleness, groups_per_step = random.randrange(4), random.randint(1, 4)
    is_deterministic = staleness == 0 and random.random() < 0.3
    num_tasks = random.randint(3, 12)
    config = load_config(
        {
            "seed": seed,
            "num_steps": random.randint(4, 8),
            "deterministic": is_deterministic,
            "rollout": {
                "groups_per_step": groups_per_step,
                "group_size": random.randint(2, 4),
                "max_tokens": random.randint(1, 4),
                "staleness": staleness,
                "window": random.randint(1, staleness * groups_per_step + 1),
                "max_retries": random.randrange(2),
                "num_workers": random.randint(1, 3),
                "max_drops_in_a_row": 16,
            },
            "algorithm": {"name": "grpo", "updates_per_step": random.randint(1, min(2, groups_per_step))},
            "trainer": {"microbatch_tokens": 64},
            "engine": {
                "max_model_len": 64,
                "count": 1 if is_deterministic else random.randint(1, 3),
                "landing": random.choice(["keep", "keep_kv", "drain", "abort"]),
            },
            "checkpoint": {"every_steps": random.randint(1, 4), "keep": random.randint(1, 2)},
            "supervision": {"max_replacements": random.randrange(5), "max_attempts": random.randint(1, 3)},
            "deadlines": {
                "start_s": 20,
                "group_s": 30,
                "train_s": 15,
                "save_s": 15,
                "publish_s": 25,
                "health_s": 2,
                "answer_s": 4,
            },
        }
    )
    latencies = Latencies(
        start_s=random.choice([0.0, 5.0]),
        token_s=random.choice([0.05, 0.3, 1.0]),
        grade_s=random.choice([0.1, 2.0, 8.0]),
        load_s=random.choice([0.0, 1.0]),
        verb_s=random.choice([0.01, 0.3, 1.5]),
    )
    plan = FaultPlan(
        random=Random(seed + 1),  # noqa: S311 - no secret
        num_left=random.choice([0, 1, 2, 3, 4, 6]),
        probability=random.choice([0.003, 0.01, 0.05]),
        burst=random.choice([0.0, 0.1]),
        jitter_s=random.choice([0.0, 0.05, 0.5]),
        slow_s=60.0,
    )
    return Scenario(
        config=config,
        latencies=latencies,
        num_tasks=num_tasks,
        refused=frozenset({"task-0"} if random.random() < 0.2 else ()),
        unscored=random.choice([0.0, 0.1, 0.3]),
        plan=plan,
    )


def simulate(seed: int, folder: Path) -> Outcome:
    """Run the scenario of a seed to its end.

    Args:
        seed: Decides everything.
        folder: An empty folder for the run's ledger and checkpoints; in memory it is fastest.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     simulate(0, Path(folder)).failures
        ()
    """
    simulation = _Simulation(seed, folder)
    with simulation.naming_errors():
        run_virtual(simulation.run())
    return simulation.outcome()


class _Simulation:
    """One simulated run: life after life of its driver."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.folder = folder
        self.scenario = scenario_of(seed)
        self.random = Random(seed + 2)  # noqa: S311 - no secret
        self.failures: list[str] = []
        self.faults: list[str] = []
        self.stops: list[str] = []
        self.num_kills = 0
        self.num_messages = 0
        self.seconds = 0.0
        self.moved_s = 0.0
        self.witness = Witness(self.scenario.config)
        self._trace = hashlib.blake2b(digest_size=16)
        self._life: _Life | None = None

    @contextlib.contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Take an error of the simulated code for a failure of the run."""
        try:
            yield
        except (RuntimeError, AssertionError, KeyError, TypeError, ValueError) as error:
            self.fail(f"{type(error).__name__}: {error}")

    async def run(self) -> None:
        """Lives, until one finishes or something fails."""
        is_finished = False
        while not is_finished and not self.failures:
            num_faults = len(self.faults)
            self._life = _Life(self)
            self.moved()
            self.tell("life")
            is_finished = await self._life.lead()
            if not is_finished and len(self.faults) == num_faults:
                self.fail(f"the driver ended without a fault: {self.stops[-1:]}")
            for fault in faults_of_the_folder(self.folder, self.witness):
                self.fail(fault)
        if not self.failures:
            for fault in faults_of_a_finished_run(self.folder, self.witness, self.scenario.tasks):
                self.fail(fault)
        self.tell(self.witness.content(self.folder))

    def outcome(self) -> Outcome:
        """How it went."""
        return Outcome(
            seed=self.seed,
            failures=tuple(self.failures),
            trace=self._trace.hexdigest(),
            faults=tuple(self.faults),
            stops=tuple(self.stops),
            num_kills=self.num_kills,
            num_messages=self.num_messages,
            seconds=self.seconds,
        )

    def tell(self, text: str) -> None:
        """A line of the trace."""
        self.seconds = asyncio.get_running_loop().time()
        self._trace.update(f"{self.seconds!r} {text}\n".encode())

    def moved(self) -> None:
        """The run made headway, or has a reason not to."""
        self.moved_s = asyncio.get_running_loop().time()

    def fail(self, text: str) -> None:
        """Something does not hold; the run ends here."""
        self.failures.append(text)
        if self._life is not None:
            self._life.kill()

    def on_message(self, process: str, verb: str, fate: Fate) -> None:
        """A message is sent."""
        self.num_messages += 1
        self.tell(f"{process} {verb} {fate.value}")
        if fate is not Fate.FINE:
            self.on_fault(f"{fate.value}: {process} {verb}")

    def on_fault(self, text: str) -> None:
        """A fault is injected."""
        self.faults.append(f"{asyncio.get_running_loop().time():.3f} s {text}")
        self.moved()


class _Life:
    """One driver and its processes."""

    def __init__(self, simulation: _Simulation) -> None:
        scenario = simulation.scenario
        self._simulation = simulation
        self._config = scenario.config
        self._checkpoints = simulation.folder / "checkpoints"
        self._killed = asyncio.get_running_loop().create_future()
        self._fleet: Fleet | None = None
        self._num_trainers = 0
        self._network = Network(
            scenario.plan, tell=simulation.on_message, kill_driver=self.kill, on_breach=simulation.fail
        )
        self._ledger: SimulatedLedger | None = None
        self._around = Surroundings(
            config=scenario.config,
            random=simulation.random,
            latencies=scenario.latencies,
            network=self._network,
            unscored=scenario.unscored,
            refused=scenario.refused,
            may_serve=self._may_serve,
            keep_late=self._keep_late,
            truth=simulation.witness.truth,
        )

    # --- life and death ---------------------------------------------------------------------------------------------

    async def lead(self) -> bool:
        """Whether the driver finished the run; if not it was killed, or stopped with a sentence."""
        driving = asyncio.create_task(self._drive(), name="driver")
        while not driving.done() and not self._killed.done():
            await asyncio.wait([driving, self._killed], timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if asyncio.get_running_loop().time() - self._simulation.moved_s > _STILL_S:
                self._simulation.fail(f"no headway for {_STILL_S:g} s")
        if self._killed.done():
            await _sweep()
            self._simulation.num_kills += 1
            return False
        left = [process.name for process in self._around.processes if not process.obituary]
        if left:
            self._simulation.fail(f"{left} outlived the driver")
        await _sweep()
        error = driving.exception()
        if error is None:
            return True
        if not isinstance(error, _STOPS):
            raise error
        self._simulation.stops.append(f"{type(error).__name__}: {error}")
        self._simulation.tell(self._simulation.stops[-1])
        return False

    def kill(self) -> None:
        """As SIGKILL: from here on the driver's code reaches neither ledger nor processes, and those die with it."""
        if self._killed.done():
            return
        self._killed.set_result(None)
        self._network.cut()
        if self._ledger is not None:
            self._ledger.close()
        for process in self._around.processes:
            process.kill("its driver is")

    async def _drive(self) -> None:
        """What ``TrainingRun`` does, less evaluation and export."""
        simulation, config = self._simulation, self._config
        self._ledger = SimulatedLedger(
            simulation.folder / "ledger.sqlite",
            witness=simulation.witness,
            plan=simulation.scenario.plan,
            kill_driver=self.kill,
            on_fault=simulation.on_fault,
            on_failure=simulation.fail,
        )
        waits = Waits("run")
        with contextlib.closing(self._ledger):
            crew = assemble(
                config,
                ledger=self._ledger,
                supervisor=Supervisor(config.supervision),
                make_engine=self._make_engine,
                make_worker=self._make_worker,
                make_trainer=self._make_trainer,
            )
            self._fleet = crew.fleet
            parts = (crew.workers, crew.fleet, crew.trainer)
            async with started(*parts, waits=waits, timeout_s=config.deadlines.start_s):
                watch = Watch(
                    config, fleet=crew.fleet, workers=crew.workers, supervisor=crew.supervisor, tell=self._tell
                )
                incarnations = Incarnations(
                    config,
                    tasks=simulation.scenario.tasks,
                    crew=crew,
                    outlets=self._outlets(crew, watch),
                    checkpoints_dir=self._checkpoints,
                    waits=waits,
                    note=simulation.tell,
                )
                await work_under_watch(incarnations.run(), watch.run())

    # --- parts ------------------------------------------------------------------------------------------------------

    def _make_engine(self, name: str, is_replacement: bool) -> SimulatedEngine:
        self._check_room(SimulatedEngine.__name__, "vllm", self._config.engine.count)
        return SimulatedEngine(self._around, name=name, is_replacement=is_replacement)

    def _make_worker(self, name: str) -> SimulatedWorker:
        self._check_room(SimulatedWorker.__name__, "worker", self._config.rollout.num_workers)
        return SimulatedWorker(self._around, name=name, number=self._simulation.witness.next_segment())

    def _make_trainer(self) -> SimulatedTrainer:
        self._check_room(SimulatedTrainer.__name__, "trainer", 1)
        self._num_trainers += 1
        return SimulatedTrainer(self._around, name=f"trainer-{self._num_trainers}", path="weights")

    def _check_room(self, what: str, prefix: str, most: int) -> None:
        self._network.check()
        living = [p.name for p in self._around.processes if p.name.startswith(prefix) and not p.obituary]
        if len(living) >= most:
            self._simulation.fail(f"one more {what} beside {living}, of which there may be {most}")

    # --- what the driver and its processes tell ---------------------------------------------------------------------

    def _outlets(self, crew: Crew, watch: Watch) -> Outlets:
        def on_step(step: int, record: dict[str, float]) -> None:
            self._network.check()
            watch.step = step
            self._simulation.moved()
            self._simulation.tell(f"step {step} {sorted(record.items())}")
            trainer = crew.trainer.part
            assert isinstance(trainer, SimulatedTrainer), trainer
            for fault in self._simulation.witness.faults_of_a_step(crew.ledger, trainer.inside.trained):
                self._simulation.fail(fault)
            self._deliver_ghost()

        return Outlets(
            on_step=on_step,
            on_event=self._on_event,
            checkpoint_path=lambda step: checkpoint_path(self._checkpoints, step=step),
            on_checkpoint=self._on_checkpoint,
            origin_s=0.0,
        )

    def _on_checkpoint(self, step: int) -> None:
        self._network.check()
        self._simulation.tell(f"checkpoint {step}")
        retain(self._checkpoints, keep=self._config.checkpoint.keep)

    def _on_event(self, event: Event) -> None:
        self._network.check()
        self._simulation.tell(f"{event.kind.value} {sorted(event.fields.items())}")
        if event.kind is EventKind.GROUP_REUSED:
            self._simulation.witness.on_admission(str(event.fields["group"]))

    def _tell(self, kind: EventKind, **fields: str | int | float) -> None:
        self._on_event(Event(kind=kind, time_s=asyncio.get_running_loop().time(), fields=fields))

    def _may_serve(self, request: SampleRequest, held: WeightVersion) -> None:
        """An engine samples a token: it must hold the fleet's version, or the one that is landing."""
        assert self._fleet is not None
        incarnation = self._simulation.witness.incarnation
        if f".r{incarnation}." not in request.id:
            return
        landing = self._around.shared_memory.get("weights")
        if held != self._fleet.version and held.digest != landing:
            self._simulation.fail(f"{request.id} is sampled under {held}, and the fleet holds {self._fleet.version}")

    def _deliver_ghost(self) -> None:
        """Now and then a result of long ago arrives once more."""
        random, records = self._simulation.random, self._simulation.witness.records
        if records and random.random() < _GHOSTS:
            self._keep_late(random.choice(records))

    def _keep_late(self, record: GroupRecord) -> None:
        """A result arrives a second time, when the first has been dealt with: the ledger turns it down."""
        if self._killed.done() or self._ledger is None or self._ledger.is_pending(record):
            return
        if self._ledger.receive(record):
            self._simulation.fail(f"the ledger took {record.id}, attempt {record.attempt}, a second time")


async def _sweep() -> None:
    """Take away all tasks but the present one."""
    me = asyncio.current_task()
    while tasks := asyncio.all_tasks() - {me}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
