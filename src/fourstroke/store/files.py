"""Writing files of a run folder: whole or not at all, or a line at a time; a full disk becomes one sentence.

Knows nothing of what is written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fourstroke.errors import RunFolderError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the failures to write ``path`` that a user can mend into one sentence; others propagate.

    Raises:
        RunFolderError: The disk is full, or the place may not be written.

    Example:
        >>> with writing(Path("runs/x/metrics.jsonl")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
        fourstroke.errors.RunFolderError: runs/x/metrics.jsonl cannot be written, since its disk is full; free some \
space there or set runs_dir to a folder on another disk
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise full_disk(path) from error
        if error.errno in _NOT_ALLOWED:
            raise RunFolderError(
                f"{path} cannot be written ({error.strerror}); mend that or set runs_dir to another folder"
            ) from error
        raise


def stamp(path: Path) -> tuple[int, int] | None:
    """Time and size of a file, which change whenever somebody has written there; None where there is none.

    Example:
        >>> stamp(Path("nowhere"))
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size


def full_disk(path: Path) -> RunFolderError:
    """The error for a disk without room for ``path``."""
    return RunFolderError(
        f"{path} cannot be written, since its disk is full; free some space there or set runs_dir to a folder on "
        "another disk"
    )


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; the system may take them in parts."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def write_atomic(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` so that a reader, or the disk after a power cut, has the old file or the new one.

    Raises:
        RunFolderError: The disk is full, or the place may not be written.
    """
    sibling = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with sibling.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            sibling.replace(path)
        except OSError:
            sibling.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to disk: a new name is in the folder, not in the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_replacing(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` so that a reader has the old file or the new one; a power cut may take it.

    Raises:
        RunFolderError: The disk is full, or the place may not be written.
    """
    sibling = path.with_name(f".{path.name}.tmp")
    with writing(path):
        sibling.write_bytes(data)
        sibling.replace(path)


def end_torn_line(path: Path) -> None:
    """Cut a last line that a killed writer left without its end, so that the next line stands by itself."""
    if path.is_file():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


class LineWriter:
    r"""Appends lines to one file, each with a single write, so that a killed writer tears at most the last one.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     writer = LineWriter(Path(folder, "events.jsonl"))
        ...     writer.append(b'{"a":1}')
        ...     writer.close()
        ...     Path(folder, "events.jsonl").read_text()
        '{"a":1}\n'
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def append(self, line: bytes) -> None:
        """Append a line; its end is added.

        Raises:
            RunFolderError: The disk is full.
        """
        assert b"\n" not in line, line
        with writing(self._path):
            write_all(self._file.fileno(), line + b"\n")

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()
