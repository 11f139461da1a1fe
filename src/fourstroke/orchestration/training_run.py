"""One run from its configuration to its summary: start-up checks, parts, evaluation, training, and a clean end.

    prepare (no process yet) -> start parts -> evaluate -> incarnation -> export, evaluate -> summary, picture
                                                              ^  |
                                  newest checkpoint, ledger --'  '-- the trainer died: the next incarnation

Everything that can be refused is refused in ``prepare_run`` and ``prepare_resume``, before anything heavy is loaded.
Training itself, through deaths and resumes, is in ``incarnations``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from fourstroke.config import ProcessSettings, RunConfig, resolve_reference
from fourstroke.engines.fleet import Fleet
from fourstroke.errors import ConfigError, FourstrokeError, InterruptedRunError
from fourstroke.evaluation import EvaluationReport, counted_apart, evaluate, in_words, read_evaluations
from fourstroke.observability import (
    Event,
    EventKind,
    MemorySampler,
    Reporter,
    Waits,
    WaitsReport,
    draw_curves,
    duration,
    unix_now,
    utc_now,
)
from fourstroke.observability.sinks import SinkFeed, SinkSite, check_sinks
from fourstroke.orchestration.controller import Outlets
from fourstroke.orchestration.faults import work_under_watch
from fourstroke.orchestration.incarnations import Crew, Incarnations, assemble, started
from fourstroke.orchestration.preflight import HostFacts, check_host
from fourstroke.orchestration.retrying import RetryingRollouts
from fourstroke.orchestration.supervision import Supervisor
from fourstroke.orchestration.watch import Watch
from fourstroke.store import (
    Ledger,
    RunFolder,
    RunStatus,
    Summary,
    read_metrics,
    write_atomic,
    writing,
)
from fourstroke.store.checkpoints import newest_checkpoint, retain
from fourstroke.trainer.catalogue import ModelFacts, resolve_model
from fourstroke.types import Engine, Taskset, Trainer, Worker

_NUM_STEPS_FOR_ETA = 5
_WAITS_EACH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What parts need to know of where they run."""

    config: RunConfig
    settings: ProcessSettings
    model_path: Path
    logs_dir: Path
    payload_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that passed every start-up check and has a folder, but no process yet."""

    config: RunConfig
    settings: ProcessSettings
    taskset: Taskset
    model_path: Path
    folder: RunFolder

    @property
    def site(self) -> Site:
        """Where its parts run."""
        return Site(
            config=self.config,
            settings=self.settings,
            model_path=self.model_path,
            logs_dir=self.folder.logs_dir,
            payload_dir=self.folder.payload_dir,
        )

    @property
    def sink_site(self) -> SinkSite:
        """What its sinks know of it."""
        return SinkSite(
            run=self.folder.path.name,
            folder=self.folder.sinks_dir,
            settings=self.config.model_dump(mode="json"),
            config=self.config.sinks,
        )


def load_tasks(config: RunConfig) -> Taskset:
    """The taskset that the configuration names; its grader is only looked at, since workers import it.

    Raises:
        ConfigError: A reference or its arguments are wrong, or a split that the run needs is empty.
    """
    make_taskset = resolve_reference("tasks.use", config.tasks.use, arguments=config.tasks.arguments)
    resolve_reference("grader.use", config.grader.use, arguments=config.grader.arguments)
    taskset: Taskset = make_taskset()
    if not taskset.train:
        raise ConfigError(f"tasks.use = {config.tasks.use!r} gives no training task; change tasks.arguments")
    if (config.evaluation.before or config.evaluation.after) and len(taskset.held_out) < 2:
        raise ConfigError(
            f"tasks.use = {config.tasks.use!r} holds out {len(taskset.held_out)} tasks, too few for an interval; "
            "change tasks.arguments, or set evaluation.before and evaluation.after to false"
        )
    return taskset


def prepare_run(config: RunConfig, *, settings: ProcessSettings) -> PreparedRun:
    """Check all that can be checked, get the model, and make the run folder.

    Raises:
        FourstrokeError: One sentence on what is wrong and how to mend it; nothing was started.
    """
    taskset, model_path = _checked(config, settings=settings)
    folder = RunFolder.create(config, now=utc_now())
    return PreparedRun(config=config, settings=settings, taskset=taskset, model_path=model_path, folder=folder)


def prepare_resume(path: Path, config: RunConfig, *, settings: ProcessSettings) -> PreparedRun:
    """The same for a run that goes on in its folder.

    Args:
        path: The run folder.
        config: The folder's own configuration, or one that differs in what may change.
        settings: Of this process.

    Raises:
        FourstrokeError: One sentence on what is wrong and how to mend it; nothing was started.
    """
    taskset, model_path = _checked(config, settings=settings)
    done = newest_checkpoint(RunFolder.open(path).checkpoints_dir)
    if config.num_steps < done:
        raise ConfigError(
            f"num_steps = {config.num_steps} lies before step {done}, whose checkpoint the run would go on from; set "
            "it to that or more"
        )
    folder = RunFolder.resume(path, config)
    return PreparedRun(config=config, settings=settings, taskset=taskset, model_path=model_path, folder=folder)


def _checked(config: RunConfig, *, settings: ProcessSettings) -> tuple[Taskset, Path]:
    check_sinks(config.sinks)
    taskset = load_tasks(config)
    sweep_shared_memory(settings.shared_memory_dir)
    model_path = resolve_model(config.model.name, cache_dir=settings.cache_dir)
    facts = HostFacts.gather(runs_dir=Path(config.runs_dir), shared_memory_dir=settings.shared_memory_dir)
    check_host(config, facts=facts, model=ModelFacts.read(model_path))
    return taskset, model_path


class Makers(Protocol):
    """How the heavy parts are made, not yet started; tests put fakes here."""

    def open(self) -> None:
        """Start whatever the parts live in."""
        ...

    def engine(self, site: Site, name: str, is_replacement: bool) -> Engine:
        """An engine; a replacement must be brought to the present weights before it serves."""
        ...

    def trainer(self, site: Site) -> Trainer:
        """The trainer."""
        ...

    def worker(self, site: Site, name: str) -> Worker:
        """A rollout worker."""
        ...

    def check_health(self) -> None:
        """Return if whatever the parts live in is there.

        Raises:
            ClusterDiedError: It is not; no part can be replaced.
        """
        ...

    def close(self) -> None:
        """End whatever the parts lived in."""
        ...


def publication_path(shared_memory_dir: Path, *, pid: int) -> Path:
    """Where the run of process ``pid`` publishes its weights; one run a process, so the name is unique."""
    return shared_memory_dir / f"fourstroke-weights-{pid}"


def sweep_shared_memory(shared_memory_dir: Path) -> None:
    """Take back the memory of runs that were killed before they could."""
    for path in shared_memory_dir.glob("fourstroke-weights-*"):
        owner = path.name.rpartition("-")[2]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            path.unlink(missing_ok=True)


class TrainingRun:
    """Drives a prepared run and tells the reporter, the folder and the summary of it."""

    def __init__(self, prepared: PreparedRun, *, reporter: Reporter, makers: Makers, root_pid: int) -> None:
        """Nothing is started yet.

        Args:
            prepared: The run.
            reporter: Tells a person.
            makers: Make the parts.
            root_pid: Process below which all processes of the run are, for the sum of their memory.
        """
        self._prepared = prepared
        self._root_pid = root_pid
        self._reporter = reporter
        self._makers = makers
        self._waits = Waits("run")
        self._reports: dict[str, EvaluationReport] = {}
        self._phase_name = "start"
        self._num_steps = 0
        self._train_seconds = 0.0
        self._step_seconds: deque[float] = deque(maxlen=_NUM_STEPS_FOR_ETA)
        self._watch: Watch | None = None
        self._incarnations: Incarnations | None = None
        self._sinks = SinkFeed(prepared.sink_site)

    async def run(self) -> Summary:
        """The whole run. The summary is written whatever happens; a failure or an interrupt is raised after that."""
        started_unix = self._prepared.settings.started_unix or unix_now()
        self._origin_s = asyncio.get_running_loop().time()
        self._tell(EventKind.RUN_STARTED, run=self._prepared.folder.path.name)
        status, reason = RunStatus.FAILED, "an error that is not of Fourstroke's own; see the traceback"
        with MemorySampler(self._root_pid) as memory:
            try:
                await self._run_parts()
                status, reason = RunStatus.FINISHED, ""
            except asyncio.CancelledError as error:
                status, reason = RunStatus.INTERRUPTED, "stopped by the user"
                raise InterruptedRunError(
                    f"stopped; go on with: fourstroke resume {self._prepared.folder.path}"
                ) from error
            except FourstrokeError as error:
                reason = str(error)
                raise
            finally:
                summary = self._summary(status, reason, total_s=unix_now() - started_unix, peak=memory.peak_bytes)
                self._tell(EventKind.RUN_ENDED, status=status.value, reason=reason)
                self._prepared.folder.write_summary(summary)
                self._draw()
                await self._sinks.close()
                self._tell_of_sinks()
        return summary

    # --- parts ------------------------------------------------------------------------------------------------------

    async def _run_parts(self) -> None:
        prepared, config = self._prepared, self._prepared.config
        self._phase("start engine and trainer", total=1)
        ledger = Ledger(prepared.folder.ledger_path)
        with contextlib.closing(ledger), contextlib.closing(self._makers):
            self._makers.open()
            makers, site = self._makers, prepared.site
            crew = assemble(
                config,
                ledger=ledger,
                supervisor=Supervisor(config.supervision),
                make_engine=lambda name, is_replacement: makers.engine(site, name, is_replacement),
                make_worker=lambda name: makers.worker(site, name),
                make_trainer=lambda: makers.trainer(site),
            )
            fleet, workers, supervisor = crew.fleet, crew.workers, crew.supervisor
            async with started(workers, fleet, crew.trainer, waits=self._waits, timeout_s=config.deadlines.start_s):
                self._watch = Watch(config, fleet=fleet, workers=workers, supervisor=supervisor, tell=self._tell)
                await work_under_watch(
                    self._work(crew), self._watch_surroundings(), self._watch.run(), self._report_waits()
                )

    async def _watch_surroundings(self) -> None:
        while True:
            self._makers.check_health()
            await asyncio.sleep(self._prepared.config.deadlines.health_s)

    async def _work(self, crew: Crew) -> None:
        config, folder, fleet = self._prepared.config, self._prepared.folder, crew.fleet
        rollouts = RetryingRollouts(crew.workers, max_attempts=config.supervision.max_attempts)
        is_fresh = bool(fleet.routable)
        if config.evaluation.before and is_fresh:
            await self._evaluate("before", rollouts, fleet)
        elif not is_fresh:
            self._read_evaluation("before")
        await self._train(crew)
        exported = folder.model_path(config.num_steps)
        if not exported.exists():
            async with self._waits.within(config.deadlines.save_s, "the trained model to be exported"):
                await crew.trainer.part.export(str(exported))
        if config.evaluation.after:
            await self._evaluate("after", rollouts, fleet)

    # --- training ---------------------------------------------------------------------------------------------------

    async def _train(self, crew: Crew) -> None:
        config, folder = self._prepared.config, self._prepared.folder
        outlets = Outlets(
            on_step=self._on_step,
            on_event=self._record_event,
            checkpoint_path=folder.checkpoint_path,
            on_checkpoint=lambda _: retain(folder.checkpoints_dir, keep=config.checkpoint.keep),
            origin_s=self._origin_s,
        )
        self._incarnations = Incarnations(
            config,
            tasks=self._prepared.taskset.train,
            crew=crew,
            outlets=outlets,
            checkpoints_dir=folder.checkpoints_dir,
            waits=self._waits,
            note=self._reporter.note,
            at_step=self._at_step,
        )
        self._phase("train", total=config.num_steps)
        started_s = asyncio.get_running_loop().time()
        try:
            await self._incarnations.run()
        finally:
            self._train_seconds = asyncio.get_running_loop().time() - started_s

    # --- evaluation -------------------------------------------------------------------------------------------------

    async def _evaluate(self, name: str, rollouts: RetryingRollouts, fleet: Fleet) -> None:
        config = self._prepared.config
        tasks = self._prepared.taskset.held_out[: config.evaluation.num_tasks]
        self._phase(f"evaluate {name}", total=len(tasks))
        async with self._waits.within(config.deadlines.evaluate_s, f"the evaluation {name!r}"):
            report = await evaluate(
                tasks,
                name=name,
                rollouts=rollouts,
                config=config,
                version=fleet.version.number,
                on_task=lambda done, _: self._reporter.advance(done),
            )
        self._reports[name] = report
        write_atomic(self._evaluation_path(name), msgspec.json.format(msgspec.json.encode(report)))
        self._tell(EventKind.EVALUATED, name=name, mean=report.estimate.mean, version=report.version)
        self._reporter.note(describe(report))

    def _read_evaluation(self, name: str) -> None:
        """An evaluation that an earlier incarnation made, if it did: the weights that it judged are gone now."""
        self._reports |= read_evaluations(self._prepared.folder.evaluations_dir, names=(name,))

    def _evaluation_path(self, name: str) -> Path:
        return self._prepared.folder.evaluations_dir / f"{name}.json"

    # --- telling ----------------------------------------------------------------------------------------------------

    async def _report_waits(self) -> None:
        """Write down, each second, what every part waits for: ``fourstroke why`` reads it."""
        while True:
            waits = [*self._waits.now()]
            if self._watch is not None:
                waits += self._watch.waits()
            if self._incarnations is not None and (controller := self._incarnations.controller) is not None:
                waits += [*controller.waits.now(), *controller.trainer_waits]
            report = WaitsReport(
                written_unix=unix_now(),
                pid=os.getpid(),
                phase=self._phase_name,
                step=self._num_steps,
                waits=tuple(waits),
            )
            self._prepared.folder.write_waits(report)
            self._tell_of_sinks()
            await asyncio.sleep(_WAITS_EACH_S)

    def _phase(self, name: str, *, total: int) -> None:
        self._phase_name = name
        self._tell(EventKind.PHASE_STARTED, phase=name, total=total)
        self._reporter.phase(name, total=total)

    def _tell(self, kind: EventKind, **fields: str | int | float) -> None:
        time_s = asyncio.get_running_loop().time() - self._origin_s
        self._record_event(Event(kind=kind, time_s=time_s, fields=fields))

    def _record_event(self, event: Event) -> None:
        self._prepared.folder.append_event(event)
        self._sinks.event(event)

    def _tell_of_sinks(self) -> None:
        for problem in self._sinks.problems():
            self._tell(EventKind.SINK_FAILED, detail=problem)
            self._reporter.note(problem)

    def _at_step(self, step: int) -> None:
        """Steps up to this one are done; an incarnation goes back to that of its checkpoint."""
        self._num_steps = step
        if self._watch is not None:
            self._watch.step = step

    def _on_step(self, step: int, record: dict[str, float]) -> None:
        self._at_step(step)
        self._prepared.folder.append_metrics(record)
        self._sinks.record(record)
        self._step_seconds.append(record["time/step_s"])
        remaining = self._prepared.config.num_steps - step
        eta_s = remaining * sum(self._step_seconds) / len(self._step_seconds)
        self._reporter.step(step, total=self._prepared.config.num_steps, record=record, eta_s=eta_s)

    def _summary(self, status: RunStatus, reason: str, *, total_s: float, peak: int) -> Summary:
        before, after = (self._reports.get(name) for name in ("before", "after"))
        return Summary(
            name=self._prepared.config.name,
            status=status,
            reason=reason,
            run_folder=str(self._prepared.folder.path),
            before=before.estimate if before else None,
            after=after.estimate if after else None,
            train_seconds=self._train_seconds,
            total_seconds=total_s,
            num_steps=self._num_steps,
            peak_memory_bytes=peak,
        )

    def _draw(self) -> None:
        folder = self._prepared.folder
        if self._num_steps:
            points = {name: report.estimate for name, report in self._reports.items()}
            with writing(folder.curves_path):
                draw_curves(
                    read_metrics(folder.metrics_path),
                    folder.curves_path,
                    before=points.get("before"),
                    after=points.get("after"),
                    title=folder.path.name,
                )


def describe(report: EvaluationReport) -> str:
    """One line on an evaluation: its interval, and apart from each other what failed, was not scored or was cut."""
    estimate = report.estimate
    return (
        f"held-out {report.name}: {estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}] over "
        f"{estimate.num_tasks} tasks x {estimate.num_samples // max(estimate.num_tasks, 1)} samples"
        f"{in_words(counted_apart(report))}"
    )


def summary_lines(summary: Summary, *, curves: Path) -> list[tuple[str, str]]:
    """The summary as pairs of name and value for a person."""
    lines = [("run", f"{summary.name}, {summary.status.value}, {summary.num_steps} steps")]
    if summary.reason:
        lines.append(("reason", summary.reason))
    for name, estimate in (("before", summary.before), ("after", summary.after)):
        if estimate is not None:
            interval = f"{estimate.mean:.3f}  95 % [{estimate.low:.3f}, {estimate.high:.3f}]"
            population = f"{estimate.num_tasks} tasks, {estimate.num_samples} samples"
            lines.append((f"held-out {name}", f"{interval}  {population}"))
    lines += [
        ("training", duration(summary.train_seconds)),
        ("in all", duration(summary.total_seconds)),
        ("peak memory", f"{summary.peak_memory_bytes / 1e9:.1f} GB"),
    ]
    return [*lines, ("picture", str(curves))] if curves.exists() else lines
