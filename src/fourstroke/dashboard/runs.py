"""Run folders as the pages read them: found below the paths given, and read again only when their files changed."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from fourstroke.config import RunConfig, load_config, process_settings
from fourstroke.errors import FourstrokeError, RunFolderError
from fourstroke.evaluation import EvaluationReport, read_evaluations
from fourstroke.observability import Event, WaitsReport
from fourstroke.store import (
    Audit,
    EpisodeFilter,
    EpisodeIndex,
    Incarnation,
    Ledger,
    RunFolder,
    RunIdentity,
    Summary,
    ledger_files,
    read_events,
    read_group,
    read_metrics,
    read_summary,
    read_waits,
    stamp,
)
from fourstroke.tokens.pieces import TokenPieces
from fourstroke.types import Group

T = TypeVar("T")

# Runs that are indexed at the start; the index of 100,000 episodes takes a second and about 40 MB.
_NUM_WARM = 4


class RunState(StrEnum):
    """What a run does now."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    GONE = "not running"


class _Cached(Generic[T]):
    """What was read out of some files, until one of them changes."""

    def __init__(self, read: Callable[[], T], paths: Iterable[Path]) -> None:
        self._read, self._paths = read, tuple(paths)
        self._signature: tuple[tuple[int, int] | None, ...] | None = None
        self._value: T | None = None

    def get(self) -> T:
        signature = tuple(stamp(path) for path in self._paths)
        if self._value is None or signature != self._signature:
            self._value, self._signature = self._read(), signature
        return self._value


class Run:
    """One run folder, for reading. May be asked from any thread.

    Args:
        name: How the pages call it.
        path: The folder.

    Raises:
        RunFolderError: It is no run folder, is damaged, or has a newer schema.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.folder = RunFolder.open(path)
        self.index = EpisodeIndex(self.folder.ledger_path)
        folder = self.folder
        self._identity = _Cached(lambda: RunFolder.open(path).identity, [path / "run.json"])
        self._config = _Cached(lambda: load_config(folder.config_path), [folder.config_path])
        self._metrics = _Cached(lambda: _present(folder.metrics_path, read_metrics) or [], [folder.metrics_path])
        self._events = _Cached(lambda: _present(folder.events_path, read_events) or [], [folder.events_path])
        self._audit = _Cached(self._read_audit, ledger_files(folder.ledger_path))
        self._scores = _Cached(self.index.scores_by_step, ledger_files(folder.ledger_path))

    @property
    def identity(self) -> RunIdentity:
        """What made the run; a resume writes it anew."""
        return self._identity.get()

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self._config.get()

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Records by step; none before the first step."""
        return self._metrics.get()

    @property
    def events(self) -> list[Event]:
        """Events in order."""
        return self._events.get()

    @property
    def audit(self) -> Audit | None:
        """The ledger's balance; None before there is a ledger."""
        return self._audit.get()[0]

    @property
    def incarnations(self) -> tuple[Incarnation, ...]:
        """Incarnations so far."""
        return self._audit.get()[1]

    @property
    def scores_by_step(self) -> dict[int, list[list[float]]]:
        """Scores of the trained episodes by step and group."""
        return self._scores.get()

    @property
    def waits(self) -> WaitsReport | None:
        """What each part waits for, or last waited for; None before the run wrote it."""
        return _present(self.folder.waits_path, read_waits)

    @property
    def summary(self) -> Summary | None:
        """The outcome; None while there is none, or where the run was resumed after it, which writes waits anew."""
        ended, waited = stamp(self.folder.summary_path), stamp(self.folder.waits_path)
        if ended is None or (waited is not None and waited[0] > ended[0]):
            return None
        return read_summary(self.folder.summary_path)

    @property
    def state(self) -> RunState:
        """What it does now."""
        summary = self.summary
        if summary is not None:
            return RunState(summary.status.value)
        return RunState.RUNNING if self._is_alive() else RunState.GONE

    @property
    def evaluations(self) -> tuple[EvaluationReport, ...]:
        """The held-out evaluations, by version."""
        reports = read_evaluations(self.folder.evaluations_dir).values()
        return tuple(sorted(reports, key=lambda report: report.version))

    def group(self, key: str, *, incarnation: int, attempt: int) -> Group:
        """The group of one result, whole.

        Raises:
            RunFolderError: There is no such result, or its payload is gone or damaged.
            CodecError: It was written by another version of Fourstroke.
        """
        return read_group(self.folder, key, incarnation=incarnation, attempt=attempt)

    def tokenizer(self) -> TokenPieces | None:
        """The run's tokenizer, from its own models or from where its model lies on this machine; None without one."""
        name = self.config.model.name
        places = [*reversed(self.folder.models()), Path(name), process_settings().cache_dir / "models" / name]
        found = next((place for place in places if (place / "tokenizer.json").is_file()), None)
        return None if found is None else _pieces(found)

    def _read_audit(self) -> tuple[Audit | None, tuple[Incarnation, ...]]:
        if not self.folder.ledger_path.is_file():
            return None, ()
        with closing(Ledger(self.folder.ledger_path, is_read_only=True)) as ledger:
            return ledger.audit(), ledger.incarnations()

    def _is_alive(self) -> bool:
        report = self.waits
        return report is not None and psutil.pid_exists(report.pid)


class Runs:
    """The runs below some paths, found anew at each look, so that a new one shows.

    Args:
        paths: Run folders, or folders that hold them.

    Raises:
        RunFolderError: A path is no folder.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._known: dict[Path, Run] = {}
        self._refused: dict[Path, str] = {}
        self._lock = threading.Lock()
        for path in self._paths:
            if not path.is_dir():
                raise RunFolderError(f"{path} is no folder; name run folders, or a folder that holds some")

    def all(self) -> tuple[Run, ...]:
        """All runs, the newest name first. A folder of the same name as another gets ``~2`` and so on behind it."""
        with self._lock:
            found = {path.resolve(): None for given in self._paths for path in _run_folders(given)}
            self._refused.clear()
            for path in found:
                if path not in self._known:
                    same = sum(known.name == path.name for known in self._known)
                    name = path.name if same == 0 else f"{path.name}~{same + 1}"
                    try:
                        self._known[path] = Run(name, path)
                    except RunFolderError as error:
                        self._refused[path] = str(error)
            kept = [self._known[path] for path in found if path in self._known]
            return tuple(sorted(kept, key=lambda run: run.name, reverse=True))

    def warm_up(self) -> None:
        """Index the newest runs before anybody asks; what cannot be read is told by its pages."""
        for run in self.all()[:_NUM_WARM]:
            with contextlib.suppress(FourstrokeError):
                run.index.page(EpisodeFilter(), limit=1)

    @property
    def refused(self) -> tuple[str, ...]:
        """Why folders that look like runs are none that can be read; of the last look."""
        return tuple(self._refused.values())

    def named(self, name: str) -> Run | None:
        """The run of a name."""
        return next((run for run in self.all() if run.name == name), None)


def _run_folders(path: Path) -> list[Path]:
    if (path / "run.json").is_file():
        return [path]
    return [file.parent for file in sorted(path.glob("*/run.json"))]


def _present(path: Path, read: Callable[[Path], T]) -> T | None:
    return read(path) if path.is_file() else None


_pieces = functools.cache(TokenPieces)
