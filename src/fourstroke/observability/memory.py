"""Peak memory of a whole process tree, by proportional set size (PSS).

PSS divides each shared page by the number of processes that map it, so a sum over the tree counts shared memory once.
Reads only; a process that ends between the listing and the reading is passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import psutil

# A resident set that has grown by less says nothing new.
_NEW_HIGH = 1.01


def tree_pss_bytes(root_pid: int) -> int:
    """PSS now of a process and all its descendants, in bytes; 0 once the root is gone. Linux only.

    Example:
        >>> import os
        >>> tree_pss_bytes(os.getpid()) > 1_000_000
        True
    """
    return _sum_over_tree(root_pid, lambda process: int(process.memory_full_info().pss))


def tree_rss_bytes(root_pid: int) -> int:
    """Resident set now of a process and all its descendants, in bytes; shared pages count once for each process.

    Never below the PSS, and a thousand times cheaper: the kernel keeps it, where PSS walks every page.

    Example:
        >>> import os
        >>> tree_rss_bytes(os.getpid()) > 1_000_000
        True
    """
    return _sum_over_tree(root_pid, lambda process: int(process.memory_info().rss))


def _sum_over_tree(root_pid: int, of: Callable[[psutil.Process], int]) -> int:
    total = 0
    try:
        root = psutil.Process(root_pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += of(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


class MemorySampler:
    """A thread that samples memory from construction until ``close``, and keeps the largest PSS of the tree.

    The resident set is read each interval. The PSS, whose walk over gigabytes takes a tenth of a second and holds up
    the page faults of the process walked, is read when the resident set has reached a new high, and at the end.

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
        high_bytes, is_last = 0, False
        while True:
            rss_bytes = tree_rss_bytes(self._root_pid)
            if is_last or rss_bytes > high_bytes * _NEW_HIGH:
                high_bytes = max(high_bytes, rss_bytes)
                self._peak_bytes = max(self._peak_bytes, tree_pss_bytes(self._root_pid))
            if is_last:
                return
            is_last = self._is_closing.wait(self._interval_s)
