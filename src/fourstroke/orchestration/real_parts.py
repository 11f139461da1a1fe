"""The real parts of a run, each in its place: an embedded Ray, and actors for engines, trainer and workers."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fourstroke.orchestration.placement import Cluster, RayEngine, RayTrainer, RayWorker
from fourstroke.orchestration.training_run import publication_path

if TYPE_CHECKING:
    from fourstroke.config import ProcessSettings
    from fourstroke.orchestration.training_run import Site
    from fourstroke.types import Engine, Trainer, Worker


def cluster_folder(*, pid: int) -> Path:
    """Where the Ray of the run of process ``pid`` keeps its sockets and logs."""
    return Path(tempfile.gettempdir()) / f"fourstroke-ray-{pid}"


class RealParts:
    """Makes the parts of ``training_run.Makers`` as Ray actors.

    Ray is looked at before it is asked for an actor: a dead one would hold up the whole driver.
    """

    def __init__(self) -> None:
        self._cluster = Cluster(cluster_folder(pid=os.getpid()))

    def leftovers(self, settings: ProcessSettings) -> list[Path]:
        """What a killed driver would leave: for its guardian."""
        return [publication_path(settings.shared_memory_dir, pid=os.getpid()), self._cluster.folder]

    def open(self) -> None:
        """Start Ray; folders of runs whose processes are all gone are removed before."""
        for folder in cluster_folder(pid=0).parent.glob("fourstroke-ray-*"):
            owner = folder.name.rpartition("-")[2]
            if owner.isdecimal() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(folder, ignore_errors=True)
        self._cluster.start()

    def engine(self, site: Site, name: str, is_replacement: bool) -> Engine:
        """A vLLM engine."""
        self._cluster.check_health()
        return RayEngine(
            site.config,
            cluster=self._cluster,
            model_path=site.model_path,
            name=name,
            is_replacement=is_replacement,
            log_path=site.logs_dir / f"{name}.log",
        )

    def trainer(self, site: Site) -> Trainer:
        """The trainer of one process."""
        self._cluster.check_health()
        return RayTrainer(
            site.config,
            cluster=self._cluster,
            model_path=site.model_path,
            payload_dir=site.payload_dir,
            publication_path=publication_path(site.settings.shared_memory_dir, pid=os.getpid()),
            log_path=site.logs_dir / "trainer.log",
        )

    def worker(self, site: Site, name: str) -> Worker:
        """A rollout worker."""
        self._cluster.check_health()
        return RayWorker(
            site.config,
            cluster=self._cluster,
            model_path=site.model_path,
            name=name,
            payload_dir=site.payload_dir,
            log_path=site.logs_dir / f"{name}.log",
            environment=site.settings.environment,
        )

    def check_health(self) -> None:
        """Return if Ray lives.

        Raises:
            ClusterDiedError: It does not; no part can be replaced.
        """
        self._cluster.check_health()

    def close(self) -> None:
        """End Ray."""
        self._cluster.stop()
