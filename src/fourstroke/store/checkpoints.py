"""Which checkpoints a run folder holds, and which of them are kept. What is in one is the trainer's matter.

    checkpoints/step-000010/trainer.json     whole: this file is written last, and the folder gets its name after that
    retain      rename to .step-000008.removed/, fsync of the parent -> delete

Invariant: the newest whole checkpoint is never removed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from fourstroke.store.files import sync_folder, writing

CHECKPOINT_MANIFEST = "trainer.json"

_STEP = re.compile(r"step-(\d{6,})")


def checkpoint_path(folder: Path, *, step: int) -> Path:
    """Where the checkpoint of a step lies among a run's checkpoints.

    Example:
        >>> checkpoint_path(Path("checkpoints"), step=10).name
        'step-000010'
    """
    return folder / f"step-{step:06d}"


def checkpoints(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder, ascending; none if the folder is not there.

    Example:
        >>> checkpoints(Path("no-such-folder"))
        []
    """
    return sorted(step for step, _ in _whole(folder))


def newest_checkpoint(folder: Path) -> int:
    """Step of the newest whole checkpoint; 0, the beginning of the run, if there is none.

    Example:
        >>> newest_checkpoint(Path("no-such-folder"))
        0
    """
    return max(checkpoints(folder), default=0)


def retain(folder: Path, *, keep: int) -> None:
    """Delete all but the ``keep`` newest whole checkpoints; a deletion cut short is finished by the next call.

    Raises:
        RunFolderError: The folder may not be written.

    Example:
        >>> retain(Path("no-such-folder"), keep=2)
    """
    assert keep >= 1, keep
    with writing(folder):
        # Of a deletion that was cut short; its step may have been trained again since.
        _delete_removed(folder)
        for step in checkpoints(folder)[:-keep]:
            path = checkpoint_path(folder, step=step)
            # Renamed first: what is half deleted must not be found under the name of a whole one.
            path.rename(path.with_name(f".{path.name}.removed"))
            sync_folder(folder)
        _delete_removed(folder)


def _delete_removed(folder: Path) -> None:
    for removed in folder.glob(".step-*.removed"):
        shutil.rmtree(removed)


def _whole(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step-*"):
        if (match := _STEP.fullmatch(path.name)) and (path / CHECKPOINT_MANIFEST).is_file():
            yield int(match[1]), path
