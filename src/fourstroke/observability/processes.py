"""What a process that we placed asks of the kernel: not to outlive the process that placed it. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is gone, even by SIGKILL; and now, if that has happened.

    To the kernel the parent is the thread that started this process: one that ends sooner takes it along. What this
    process itself starts is not told (see ``prctl(2)``, ``PR_SET_PDEATHSIG``).

    Args:
        parent_pid: Who started this process, told by itself: whoever asks the kernel may already have been adopted.

    Example:
        >>> die_with_parent(parent_pid)  # doctest: +SKIP
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
