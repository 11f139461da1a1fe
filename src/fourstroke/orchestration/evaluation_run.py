"""One evaluation outside a training run: a run's trained model, or any model that a configuration names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fourstroke.config import ProcessSettings, RunConfig, load_config
from fourstroke.engines.vllm import VllmEngine
from fourstroke.errors import RunFolderError
from fourstroke.evaluation import EvaluationReport, evaluate
from fourstroke.observability import Reporter
from fourstroke.orchestration.preflight import HostFacts, check_host
from fourstroke.orchestration.training_run import describe, load_tasks_and_grader, started
from fourstroke.orchestration.waits import within
from fourstroke.rollout import GroupRunner
from fourstroke.store import RunFolder
from fourstroke.tokens import Renderer
from fourstroke.trainer.catalogue import ModelFacts, resolve_model


def evaluation_config(run: Path, overrides: Iterable[str]) -> RunConfig:
    """The configuration of a finished run, with its newest checkpoint as the model.

    Raises:
        RunFolderError: ``run`` is no run folder, or has no checkpoint.
    """
    folder = RunFolder.open(run)
    checkpoints = sorted(path for path in folder.checkpoints_dir.glob("step-*") if path.is_dir())
    if not checkpoints:
        raise RunFolderError(f"{run} holds no checkpoint; name a run that finished, or a recipe to evaluate its model")
    return load_config(folder.config_path, overrides=[f"model.name={checkpoints[-1]}", *overrides])


class EvaluationRun:
    """Evaluates one model on the held-out tasks."""

    def __init__(self, config: RunConfig, *, settings: ProcessSettings, reporter: Reporter) -> None:
        """Check what can be checked before anything heavy is loaded.

        Raises:
            FourstrokeError: One sentence on what is wrong and how to mend it.
        """
        self._config = config
        self._reporter = reporter
        self._taskset, self._grader = load_tasks_and_grader(config)
        self._model_path = resolve_model(config.model.name, cache_dir=settings.cache_dir)
        facts = HostFacts.gather(runs_dir=Path(config.runs_dir), shared_memory_dir=settings.shared_memory_dir)
        check_host(config, facts=facts, model=ModelFacts.read(self._model_path))

    async def run(self) -> EvaluationReport:
        """Start an engine, evaluate, and end the engine."""
        config, tasks = self._config, self._taskset.held_out[: self._config.evaluation.num_tasks]
        self._reporter.phase("start engine", total=1)
        engine = VllmEngine(config.engine, self._model_path, seed=config.seed)
        async with started(engine, timeout_s=config.deadlines.start_s):
            runner = GroupRunner(
                config,
                taskset=self._taskset,
                grader=self._grader,
                engine=engine,
                renderer=Renderer(self._model_path),
            )
            self._reporter.phase("evaluate", total=len(tasks))
            async with within(config.deadlines.evaluate_s, "the evaluation"):
                report = await evaluate(
                    tasks,
                    name="held-out",
                    runner=runner,
                    config=config,
                    version=engine.version.number,
                    on_task=lambda done, _: self._reporter.advance(done),
                )
        self._reporter.note(describe(report))
        return report
