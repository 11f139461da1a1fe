"""What the process is told by its surroundings: the one place that reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings that belong to a machine or a call, not to a run.

    Attributes:
        cache_dir: Where converted models are kept (``FOURSTROKE_CACHE``).
        shared_memory_dir: RAM-backed folder for weights in transit (``FOURSTROKE_SHM``).
        started_unix: When the command that a person typed began, seconds since 1970 (``FOURSTROKE_STARTED_UNIX``,
            set by the Makefile so that ``summary.json`` counts from make's first line), or None.
        environment: All variables as they were; for processes that must not inherit what an engine sets for its own.
    """

    cache_dir: Path
    shared_memory_dir: Path
    started_unix: float | None
    environment: Mapping[str, str]


def process_settings() -> ProcessSettings:
    """Read the surroundings now."""
    home_cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    started = os.environ.get("FOURSTROKE_STARTED_UNIX")
    return ProcessSettings(
        cache_dir=Path(os.environ.get("FOURSTROKE_CACHE", home_cache / "fourstroke")),
        shared_memory_dir=Path(os.environ.get("FOURSTROKE_SHM", "/dev/shm")),  # noqa: S108 - names are unique, files 0600
        started_unix=float(started) if started else None,
        environment=dict(os.environ),
    )
