"""One run from its configuration to its summary: start-up checks, parts, evaluation, training, and a clean end.

    prepare (no process yet)  ->  start parts  ->  evaluate  ->  controller  ->  save, evaluate  ->  summary, picture

Everything that can be refused is refused in ``prepare_run``, before anything heavy is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from fourstroke.config import ProcessSettings, RunConfig, resolve_reference
from fourstroke.engines.vllm import VllmEngine
from fourstroke.errors import ConfigError, FourstrokeError, InterruptedRunError
from fourstroke.evaluation import EvaluationReport, evaluate
from fourstroke.observability import (
    Event,
    EventKind,
    MemorySampler,
    Reporter,
    draw_curves,
    duration,
    unix_now,
    utc_now,
)
from fourstroke.orchestration.controller import Controller, Outlets, Parts
from fourstroke.orchestration.placement import TrainerProcess
from fourstroke.orchestration.preflight import HostFacts, check_host
from fourstroke.orchestration.waits import within
from fourstroke.rollout import GroupRunner
from fourstroke.store import (
    Ledger,
    PayloadWriter,
    RunFolder,
    RunStatus,
    Summary,
    read_metrics,
    write_atomic,
    writing,
)
from fourstroke.tokens import Renderer
from fourstroke.tokens.render import TokenRenderer
from fourstroke.trainer.catalogue import ModelFacts, resolve_model
from fourstroke.types import Engine, Grader, Taskset, Trainer

_NUM_STEPS_FOR_ETA = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that passed every start-up check and has a folder, but no process yet."""

    config: RunConfig
    settings: ProcessSettings
    taskset: Taskset
    grader: Grader
    model_path: Path
    folder: RunFolder


def load_tasks_and_grader(config: RunConfig) -> tuple[Taskset, Grader]:
    """The taskset and grader that the configuration names.

    Raises:
        ConfigError: A reference or its arguments are wrong, or a split that the run needs is empty.
    """
    make_taskset = resolve_reference("tasks.use", config.tasks.use, arguments=config.tasks.arguments)
    make_grader = resolve_reference("grader.use", config.grader.use, arguments=config.grader.arguments)
    taskset: Taskset = make_taskset()
    grader: Grader = make_grader()
    if not taskset.train:
        raise ConfigError(f"tasks.use = {config.tasks.use!r} gives no training task; change tasks.arguments")
    if (config.evaluation.before or config.evaluation.after) and len(taskset.held_out) < 2:
        raise ConfigError(
            f"tasks.use = {config.tasks.use!r} holds out {len(taskset.held_out)} tasks, too few for an interval; "
            "change tasks.arguments, or set evaluation.before and evaluation.after to false"
        )
    return taskset, grader


def prepare_run(config: RunConfig, *, settings: ProcessSettings) -> PreparedRun:
    """Check all that can be checked, get the model, and make the run folder.

    Raises:
        FourstrokeError: One sentence on what is wrong and how to mend it; nothing was started.
    """
    taskset, grader = load_tasks_and_grader(config)
    sweep_shared_memory(settings.shared_memory_dir)
    model_path = resolve_model(config.model.name, cache_dir=settings.cache_dir)
    facts = HostFacts.gather(runs_dir=Path(config.runs_dir), shared_memory_dir=settings.shared_memory_dir)
    check_host(config, facts=facts, model=ModelFacts.read(model_path))
    folder = RunFolder.create(config, now=utc_now())
    return PreparedRun(
        config=config, settings=settings, taskset=taskset, grader=grader, model_path=model_path, folder=folder
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Makers:
    """How the heavy parts are made, not yet started; tests put fakes here."""

    engine: Callable[[PreparedRun], Engine]
    trainer: Callable[[PreparedRun], Trainer]
    renderer: Callable[[PreparedRun], TokenRenderer]


def _make_engine(prepared: PreparedRun) -> Engine:
    config, log_path = prepared.config, prepared.folder.logs_dir / "engine.log"
    return VllmEngine(config.engine, prepared.model_path, seed=config.seed, log_path=log_path)


def _make_trainer(prepared: PreparedRun) -> Trainer:
    return TrainerProcess(
        prepared.config,
        model_path=prepared.model_path,
        publication_path=publication_path(prepared.settings.shared_memory_dir, pid=os.getpid()),
        log_path=prepared.folder.logs_dir / "trainer.log",
        environment=prepared.settings.environment,
    )


REAL_PARTS = Makers(engine=_make_engine, trainer=_make_trainer, renderer=lambda prepared: Renderer(prepared.model_path))


def publication_path(shared_memory_dir: Path, *, pid: int) -> Path:
    """Where the run of process ``pid`` publishes its weights; one run a process, so the name is unique."""
    return shared_memory_dir / f"fourstroke-weights-{pid}"


def sweep_shared_memory(shared_memory_dir: Path) -> None:
    """Take back the memory of runs that were killed before they could."""
    for path in shared_memory_dir.glob("fourstroke-weights-*"):
        owner = path.name.rpartition("-")[2]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            path.unlink(missing_ok=True)


@asynccontextmanager
async def started(*parts: Engine | Trainer, timeout_s: float) -> AsyncIterator[None]:
    """Parts started side by side, and all of them closed on the way out, those that failed to start too.

    Raises:
        FourstrokeError: What the first part to fail raised.
        DeadlineError: One of them took too long.
    """
    try:
        starting = [asyncio.create_task(part.start()) for part in parts]
        try:
            async with within(timeout_s, "engine and trainer to start"):
                await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        yield
    finally:
        await asyncio.gather(*(part.close() for part in parts))


class TrainingRun:
    """Drives a prepared run and tells the reporter, the folder and the summary of it."""

    def __init__(self, prepared: PreparedRun, *, reporter: Reporter, makers: Makers = REAL_PARTS) -> None:
        self._prepared = prepared
        self._reporter = reporter
        self._makers = makers
        self._reports: dict[str, EvaluationReport] = {}
        self._num_steps = 0
        self._train_seconds = 0.0
        self._step_seconds: deque[float] = deque(maxlen=_NUM_STEPS_FOR_ETA)

    async def run(self) -> Summary:
        """The whole run. The summary is written whatever happens; a failure or an interrupt is raised after that."""
        started_unix = self._prepared.settings.started_unix or unix_now()
        self._origin_s = asyncio.get_running_loop().time()
        self._tell(EventKind.RUN_STARTED, run=self._prepared.folder.path.name)
        status, reason = RunStatus.FAILED, "an error that is not of Fourstroke's own; see the traceback"
        with MemorySampler(os.getpid()) as memory:
            try:
                await self._run_parts()
                status, reason = RunStatus.FINISHED, ""
            except asyncio.CancelledError as error:
                status, reason = RunStatus.INTERRUPTED, "stopped by the user"
                raise InterruptedRunError(f"stopped; the run folder is {self._prepared.folder.path}") from error
            except FourstrokeError as error:
                reason = str(error)
                raise
            finally:
                summary = self._summary(status, reason, total_s=unix_now() - started_unix, peak=memory.peak_bytes)
                self._tell(EventKind.RUN_ENDED, status=status.value, reason=reason)
                self._prepared.folder.write_summary(summary)
                self._draw()
        return summary

    async def _run_parts(self) -> None:
        prepared, config = self._prepared, self._prepared.config
        self._phase("start engine and trainer", total=1)
        engine, trainer = self._makers.engine(prepared), self._makers.trainer(prepared)
        async with started(engine, trainer, timeout_s=config.deadlines.start_s):
            runner = GroupRunner(
                config,
                taskset=prepared.taskset,
                grader=prepared.grader,
                engine=engine,
                renderer=self._makers.renderer(prepared),
            )
            if config.evaluation.before:
                await self._evaluate("before", runner, engine)
            await self._train(engine, trainer, runner)
            async with within(config.deadlines.save_s, "the trained model to be saved"):
                await trainer.save(str(prepared.folder.checkpoints_dir / f"step-{config.num_steps:06d}"))
            if config.evaluation.after:
                await self._evaluate("after", runner, engine)

    async def _train(self, engine: Engine, trainer: Trainer, runner: GroupRunner) -> None:
        prepared, folder = self._prepared, self._prepared.folder
        ledger, payload = Ledger(folder.ledger_path), PayloadWriter(folder.payload_dir)
        parts = Parts(engine=engine, trainer=trainer, runner=runner, ledger=ledger, payload=payload)
        outlets = Outlets(on_step=self._on_step, on_event=folder.append_event, origin_s=self._origin_s)
        controller = Controller(prepared.config, tasks=prepared.taskset.train, parts=parts, outlets=outlets)
        self._phase("train", total=prepared.config.num_steps)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        with contextlib.closing(ledger), contextlib.closing(payload):
            try:
                await controller.run()
            finally:
                self._train_seconds = loop.time() - started_s

    async def _evaluate(self, name: str, runner: GroupRunner, engine: Engine) -> None:
        config = self._prepared.config
        tasks = self._prepared.taskset.held_out[: config.evaluation.num_tasks]
        self._phase(f"evaluate {name}", total=len(tasks))
        async with within(config.deadlines.evaluate_s, f"the evaluation {name!r}"):
            report = await evaluate(
                tasks,
                name=name,
                runner=runner,
                config=config,
                version=engine.version.number,
                on_task=lambda done, _: self._reporter.advance(done),
            )
        self._reports[name] = report
        file = self._prepared.folder.evaluations_dir / f"{name}.json"
        write_atomic(file, msgspec.json.format(msgspec.json.encode(report)))
        self._tell(EventKind.EVALUATED, name=name, mean=report.estimate.mean, version=report.version)
        self._reporter.note(describe(report))

    def _phase(self, name: str, *, total: int) -> None:
        self._tell(EventKind.PHASE_STARTED, phase=name, total=total)
        self._reporter.phase(name, total=total)

    def _tell(self, kind: EventKind, **fields: str | int | float) -> None:
        time_s = asyncio.get_running_loop().time() - self._origin_s
        self._prepared.folder.append_event(Event(kind=kind, time_s=time_s, fields=fields))

    def _on_step(self, step: int, record: dict[str, float]) -> None:
        self._num_steps = step
        self._prepared.folder.append_metrics(record)
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
    """One line on an evaluation, with its interval and what was left out."""
    estimate = report.estimate
    left_out = f", {report.num_unscored} unscored" if report.num_unscored else ""
    return (
        f"held-out {report.name}: {estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}] over "
        f"{estimate.num_tasks} tasks x {estimate.num_samples // max(estimate.num_tasks, 1)} samples{left_out}"
    )


def summary_lines(summary: Summary, *, curves: Path) -> list[tuple[str, str]]:
    """The summary as pairs of name and value for a person."""
    lines = [("run", f"{summary.name}, {summary.status.value}, {summary.num_steps} steps")]
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
