r"""The guardian: a small process above the driver that lets nothing of a run outlive it.

    shell -- guardian -- driver -- Ray, engine, vLLM's core, trainer, worker, grader ...
                |  ^                                   |
                |  '---- orphans of the run, whoever of it was killed
                '-- holds the lock on the run folder, with the driver, and after it

    fork -> (reap orphans, forward signals)* -> driver ended -> kill what is left -> tidy -> exit as the driver did

Runs before anything heavy is loaded, and may load nothing heavy itself. Decides nothing about the run.

Invariants:
    - Every living process of the run is a descendant of the guardian: an orphan is handed to the next subreaper above
      it, by the kernel and before its parent can be reaped. So "no child is left" means "nothing is left".
    - The lock outlives the last process. Driver and guardian share one open file, to which a ``flock`` belongs. The
      descriptor waits in the socket, which holds the file open like a descriptor of a process does, and the guardian
      reads it only when all others are dead.
    - A child is not reaped before the guardian has seen its end, so no signal reaches a stranger with a used-up id.
    - If the guardian is killed, the kernel kills the driver.

Signals: guardian and driver are in one process group, so the terminal's Ctrl-C, Ctrl-\, Ctrl-Z and hang-up reach both.
The guardian stops and continues with the driver, and leaves the others to it. A signal that some process sent is
forwarded, each time, since it may be meant for the run and have reached the guardian alone. A sender that means the
whole group (``timeout``, a shell's ``kill %1``) therefore reaches the driver twice, at almost the same moment.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from fourstroke.observability.processes import adopt_orphans, die_with_parent, forget_openmp

GONE_WITHIN_S = 5.0

_LOOK_AGAIN_S = 0.05
_LONGEST_MESSAGE_BYTES = 1 << 17
_FORWARDED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_WAITED_FOR = _FORWARDED | {signal.SIGCHLD, signal.SIGALRM}


class _Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver tells the guardian, beside the descriptor of the lock."""

    folder: str
    shared_files: tuple[str, ...]


class Guard:
    """The driver's end of its guardian.

    Attributes:
        pid: Process id of the guardian: the one that the user's shell knows, and the root of the run's processes.

    Example:
        >>> guard = guarded()  # doctest: +SKIP
        >>> guard.watch(  # doctest: +SKIP
        ...     folder.path, lock_descriptor=folder.share_lock(guard.pid), shared_files=[publication_path]
        ... )
    """

    def __init__(self, *, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel

    def watch(self, folder: Path, *, lock_descriptor: int, shared_files: Sequence[Path]) -> None:
        """Put a run folder into the guardian's care. Once a process.

        Args:
            folder: Named to the user if the driver is killed.
            lock_descriptor: The open file that holds the folder's lock; held until all processes of the run are dead.
            shared_files: Files in shared memory, or folders, that are removed at the end if they are still there.

        Raises:
            OSError: The guardian is gone, or has a folder already.
        """
        announcement = _Announcement(folder=str(folder), shared_files=tuple(str(p.absolute()) for p in shared_files))
        with self._channel:
            socket.send_fds(self._channel, [msgspec.json.encode(announcement)], [lock_descriptor])


def guarded() -> Guard:
    """Fork: the child returns and is the driver; the parent is its guardian, never returns, and exits as the driver.

    The exit status is the driver's, or 128 + n if signal n killed it; then a sentence on stderr says so, and how to go
    on. All processes of the run are dead ``GONE_WITHIN_S`` seconds after the driver. Call it from a process that has no
    threads yet.

    Raises:
        OSError: The kernel refuses a process, or to make this one a subreaper.

    Example:
        >>> guard = guarded()  # doctest: +SKIP
    """
    guardian = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by some callers, and the driver's status would be lost
    adopt_orphans()
    above, below = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    driver = os.fork()
    if driver == 0:
        die_with_parent(guardian)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        above.close()
        return Guard(pid=guardian, channel=below)
    below.close()
    code = _wait_for(driver)
    _tell_and_tidy(code, survivors=_kill_all(), announcement=_received(above))
    # Straight out: buffers and exit handlers are the driver's. The lock is given back here.
    os._exit(code if code >= 0 else 128 - code)


def _wait_for(driver: int) -> int:
    """Reap orphans and forward signals until the driver ends; its exit status, or minus the signal that killed it."""
    while True:
        news = signal.sigwaitinfo(_WAITED_FOR)
        if news.si_signo == signal.SIGCHLD:
            for pid, code in _reaped():
                if pid == driver:
                    return code
        elif news.si_signo in _FORWARDED and news.si_code <= 0:  # sent by a process; the terminal's are the kernel's
            os.kill(driver, news.si_signo)


def _reaped() -> Iterator[tuple[int, int]]:
    """Children that have ended, each with its exit status or minus its signal.

    Raises:
        ChildProcessError: No child is left.
    """
    while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
        pid, status = ended
        forget_openmp(pid)
        yield pid, os.waitstatus_to_exitcode(status)


def _kill_all() -> list[int]:
    """Kill all descendants until none is left; returns the ids of those that did not die in time.

    A process that has been killed makes no more children, so each look has fewer left to find. What does not die
    belongs to another user, or is deep in the kernel and will never run again.
    """
    signal.setitimer(signal.ITIMER_REAL, GONE_WITHIN_S)
    guardian = psutil.Process()
    while True:
        left = guardian.children(recursive=True)
        for process in left:  # parents first, so that all of them are reaped here
            with contextlib.suppress(psutil.Error):
                process.kill()
        try:
            for _ in _reaped():
                pass
        except ChildProcessError:
            return []
        news = signal.sigtimedwait({signal.SIGCHLD, signal.SIGALRM}, _LOOK_AGAIN_S)
        if news is not None and news.si_signo == signal.SIGALRM:
            return [process.pid for process in left]


def _received(channel: socket.socket) -> _Announcement | None:
    """What the driver announced, if it did. The descriptor that comes with it stays open until this process ends."""
    channel.setblocking(False)
    try:
        message, _, _, _ = socket.recv_fds(channel, _LONGEST_MESSAGE_BYTES, 1)
    except BlockingIOError:  # a survivor holds the other end
        return None
    return msgspec.json.decode(message, type=_Announcement) if message else None


def _tell_and_tidy(code: int, *, survivors: Sequence[int], announcement: _Announcement | None) -> None:
    for path in announcement.shared_files if announcement else ():
        with contextlib.suppress(OSError):  # not there any more; what cannot be removed is the next run's to sweep
            shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()
    lines = []
    if code < 0:
        mend = f"; go on with: fourstroke resume {shlex.quote(announcement.folder)}" if announcement else ""
        lines.append(f"error: the run was killed (signal {-code}){mend}\n")
    if survivors:
        pids = ",".join(map(str, survivors))
        lines.append(f"error: some processes of the run could not be killed; look at them with: ps -fp {pids}\n")
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, "".join(lines).encode())
