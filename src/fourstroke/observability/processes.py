"""What the kernel does for a family of processes: who dies with whom, and who takes in orphans. Linux only.

Starts, watches and kills no other process.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill (SIGKILL) this process as soon as the thread that started it ends; see prctl(2).

    A child of this process does not inherit it. If the parent is gone already, this process ends at once.

    Args:
        parent_pid: Process id of the parent, where it is known, as it is after a fork. Else the parent of this moment,
            so that one which went before the call is missed.

    Raises:
        OSError: The kernel refuses.

    Example:
        >>> parent_pid = os.getpid()
        >>> if os.fork() == 0:  # doctest: +SKIP
        ...     die_with_parent(parent_pid)
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, in place of init; see prctl(2), "subreaper".

    The caller has to reap them. A child of this process does not inherit it.

    Raises:
        OSError: The kernel refuses.

    Example:
        >>> adopt_orphans()  # doctest: +SKIP
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def give_back_heap() -> None:
    """Return the free pages of this process's heap to the kernel, those between pages in use too; see malloc_trim(3).

    An allocator keeps what was freed. Where large blocks of changing sizes come and go, the holes between them grow.

    Example:
        >>> give_back_heap()
    """
    ctypes.CDLL(None).malloc_trim(0)


def forget_openmp(pid: int) -> None:
    """Remove what Intel's OpenMP registered in shared memory for a process that was killed before it could itself.

    Example:
        >>> forget_openmp(1 << 30)
    """
    for path in Path("/dev/shm").glob(f"__KMP_REGISTERED_LIB_{pid}_*"):  # noqa: S108 - that library's own choice
        path.unlink(missing_ok=True)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
