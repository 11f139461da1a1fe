"""Peak memory of a whole process tree, by proportional set size (PSS).

PSS divides each shared page by the number of processes that map it, so a sum over the tree counts shared memory once.
Reads only; a process that ends between the listing and the reading is passed over.
"""

from __future__ import annotations

import threading
from types import TracebackType

import psutil


def tree_pss_bytes(root_pid: int) -> int:
    """PSS now of a process and all its descendants, in bytes; 0 once the root is gone. Linux only.

    Example:
        >>> import os
        >>> tree_pss_bytes(os.getpid()) > 1_000_000
        True
    """
    total = 0
    try:
        root = psutil.Process(root_pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


class MemorySampler:
    """A thread that samples :func:`tree_pss_bytes` from construction until ``close``, and keeps the largest.

    Example:
        >>> import os
        >>> with MemorySampler(os.getpid()) as sampler:
        ...     pass
        >>> sampler.peak_bytes > 1_000_000
        True
    """

    def __init__(self, root_pid: int, *, interval_s: float = 1.0) -> None:
        self._root_pid = root_pid
        self._interval_s = interval_s
        self._peak_bytes = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    @property
    def peak_bytes(self) -> int:
        """Largest sum seen so far, in bytes."""
        return self._peak_bytes

    def close(self) -> None:
        """Sample a last time and end the thread. May be called twice."""
        self._is_closing.set()
        self._thread.join()

    def __enter__(self) -> MemorySampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        is_last = False
        while True:
            self._peak_bytes = max(self._peak_bytes, tree_pss_bytes(self._root_pid))
            if is_last:
                return
            is_last = self._is_closing.wait(self._interval_s)
