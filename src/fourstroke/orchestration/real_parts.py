"""The real parts of a run, each in its place: an embedded Ray, and actors for engines, trainer and workers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fourstroke.orchestration.placement import Cluster, RayEngine, RayTrainer, RayWorker
from fourstroke.orchestration.training_run import publication_path

if TYPE_CHECKING:
    from fourstroke.orchestration.training_run import PreparedRun
    from fourstroke.types import Engine, Trainer, Worker


def cluster_folder(*, pid: int) -> Path:
    """Where the Ray of the run of process ``pid`` keeps its sockets and logs."""
    return Path(tempfile.gettempdir()) / f"fourstroke-ray-{pid}"


class RealParts:
    """Makes the parts of ``training_run.Makers`` as Ray actors."""

    def __init__(self) -> None:
        self._cluster = Cluster(cluster_folder(pid=os.getpid()))

    def open(self) -> None:
        """Start Ray."""
        self._cluster.start()

    def engine(self, prepared: PreparedRun, name: str, incarnation: int) -> Engine:
        """A vLLM engine."""
        return RayEngine(
            prepared.config,
            model_path=prepared.model_path,
            name=name,
            incarnation=incarnation,
            log_path=prepared.folder.logs_dir / f"{name}.log",
        )

    def trainer(self, prepared: PreparedRun) -> Trainer:
        """The trainer of one process."""
        return RayTrainer(
            prepared.config,
            model_path=prepared.model_path,
            payload_dir=prepared.folder.payload_dir,
            publication_path=publication_path(prepared.settings.shared_memory_dir, pid=os.getpid()),
            log_path=prepared.folder.logs_dir / "trainer.log",
        )

    def worker(self, prepared: PreparedRun, name: str) -> Worker:
        """A rollout worker."""
        return RayWorker(
            prepared.config,
            model_path=prepared.model_path,
            name=name,
            payload_dir=prepared.folder.payload_dir,
            log_path=prepared.folder.logs_dir / f"{name}.log",
            environment=prepared.settings.environment,
        )

    def close(self) -> None:
        """End Ray."""
        self._cluster.stop()
