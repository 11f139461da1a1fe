"""One writer a run folder: a lock that the system gives back when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from fourstroke.errors import RunFolderError
from fourstroke.store.files import write_all, writing


class FolderLock:
    """An exclusive ``flock`` on ``<folder>/lock``, which also holds the holder's process id.

    Held until ``close``, or until the process, every child that was forked (without exec) while it was held, and who
    it was shared with are gone, so that a leftover child still keeps a second run out.

    Raises:
        RunFolderError: Another process holds it.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     lock = FolderLock(Path(folder))
        ...     lock.close()
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "lock"
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            self.close()
            raise RunFolderError(
                f"{folder} is in use by a run with process id {holder}; wait for it, stop it, or choose another folder"
            ) from error
        self._path = path
        self._name_holder(os.getpid())

    def share(self, pid: int) -> int:
        """The descriptor of the locked file, for process ``pid`` to hold the lock too: it lasts until both let go.

        The file names that process from now on, as the one to wait for or to stop.
        """
        assert self._descriptor >= 0, "the lock has been given back"
        self._name_holder(pid)
        return self._descriptor

    def close(self) -> None:
        """Let another process lock the folder. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _name_holder(self, pid: int) -> None:
        with writing(self._path):
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            write_all(self._descriptor, f"{pid}\n".encode())
