"""One evaluation outside a training run: a run's trained model, or any model that a configuration names."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fourstroke.config import ProcessSettings, RunConfig, load_config
from fourstroke.engines.fleet import Fleet
from fourstroke.errors import RunFolderError
from fourstroke.evaluation import EvaluationReport, evaluate
from fourstroke.observability import Reporter, Waits
from fourstroke.orchestration.incarnations import started
from fourstroke.orchestration.preflight import HostFacts, check_host
from fourstroke.orchestration.training_run import Makers, Site, describe, load_tasks
from fourstroke.rollout import WorkerPool
from fourstroke.store import RunFolder
from fourstroke.trainer.catalogue import ModelFacts, resolve_model


def evaluation_config(run: Path, overrides: Iterable[str]) -> RunConfig:
    """The configuration of a finished run, with its newest trained model.

    Raises:
        RunFolderError: ``run`` is no run folder, or has no model.
    """
    folder = RunFolder.open(run)
    if not (models := folder.models()):
        raise RunFolderError(f"{run} holds no model; name a run that finished, or a recipe to evaluate its model")
    return load_config(folder.config_path, overrides=[f"model.name={models[-1]}", *overrides])


class EvaluationRun:
    """Evaluates one model on the held-out tasks."""

    def __init__(self, config: RunConfig, *, settings: ProcessSettings, reporter: Reporter, makers: Makers) -> None:
        """Check what can be checked before anything heavy is loaded.

        Raises:
            FourstrokeError: One sentence on what is wrong and how to mend it.
        """
        self._config = config
        self._settings = settings
        self._reporter = reporter
        self._makers = makers
        self._taskset = load_tasks(config)
        self._model_path = resolve_model(config.model.name, cache_dir=settings.cache_dir)
        facts = HostFacts.gather(runs_dir=Path(config.runs_dir), shared_memory_dir=settings.shared_memory_dir)
        check_host(config, facts=facts, model=ModelFacts.read(self._model_path))

    async def run(self) -> EvaluationReport:
        """Start an engine and a worker, evaluate, and end them."""
        with tempfile.TemporaryDirectory(prefix="fourstroke-eval-") as folder, contextlib.closing(self._makers):
            self._reporter.phase("start engine", total=1)
            self._makers.open()
            report = await self._evaluated(Path(folder))
        self._reporter.note(describe(report))
        return report

    async def _evaluated(self, folder: Path) -> EvaluationReport:
        config, waits = self._config, Waits("evaluation")
        site = Site(
            config=config,
            settings=self._settings,
            model_path=self._model_path,
            logs_dir=folder,
            payload_dir=folder,
        )
        workers = WorkerPool(lambda name: self._makers.worker(site, name), count=config.rollout.num_workers)
        fleet = Fleet(
            lambda name, is_replacement: self._makers.engine(site, name, is_replacement),
            count=config.engine.count,
            is_fresh=True,
            on_routable=workers.route,
        )
        async with started(workers, fleet, waits=waits, timeout_s=config.deadlines.start_s):
            tasks = self._taskset.held_out[: config.evaluation.num_tasks]
            self._reporter.phase("evaluate", total=len(tasks))
            async with waits.within(config.deadlines.evaluate_s, "the evaluation"):
                return await evaluate(
                    tasks,
                    name="held-out",
                    rollouts=workers,
                    config=config,
                    version=fleet.version.number,
                    on_task=lambda done, _: self._reporter.advance(done),
                )
