"""Real process trees under a guardian: how they end, whoever is killed, and that nothing is left of them.

Every process of a tree inherits the pipe of its standard output, so that the end of that pipe proves that all are gone.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fourstroke.errors import RunFolderError
from fourstroke.store.lock import FolderLock

DRIVER = """
import os, signal, sys
from pathlib import Path
from fourstroke.observability.processes import die_with_parent
from fourstroke.orchestration.guardian import guarded
from fourstroke.store.lock import FolderLock

def say(*words):
    print(*words, flush=True)

def leave_orphan(work=signal.pause):
    # Nobody's child, in a session of its own, and deaf to polite signals.
    out, into = os.pipe()
    if (middle := os.fork()) == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.write(into, str(os.getpid()).encode())
        while True:
            work()
    os.waitpid(middle, 0)
    return int(os.read(out, 32))

guard = guarded()
"""

# A shell with one job, in the foreground of the terminal on its standard input. It says when the job stops or ends.
SHELL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if (job := os.fork()) == 0:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        break
    print("stopped", flush=True)
print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


class Tree:
    """A process under test, and all that it started."""

    def __init__(self, *arguments, **options):
        self.guardian = subprocess.Popen(
            [sys.executable, "-c", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            **{"stdin": subprocess.PIPE, **options},
        )
        self._pidfds = {}

    def words(self):
        """The next line that the tree says. Numbers of three digits or more are process ids, watched from now on."""
        words = self.guardian.stdout.readline().split()
        for pid in (int(word) for word in words if word.isdecimal() and len(word) > 2):
            self._pidfds.setdefault(pid, os.pidfd_open(pid))
        return words

    def is_alive(self, pid):
        return not select.select([self._pidfds[pid]], [], [], 0)[0]

    def await_death(self, pid):
        """Wait for a process that need not be our child; a zombie is dead."""
        assert select.select([self._pidfds[pid]], [], [], 60)[0], f"{pid} lives on"

    def press_return(self):
        self.guardian.stdin.write("\n")
        self.guardian.stdin.flush()

    def stop(self):
        self.guardian.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.guardian.pid, os.WSTOPPED)

    def end(self):
        """Status and standard error of the guardian. At its end no process of the tree is left, and no word."""
        code = self.guardian.wait()
        assert select.select([self.guardian.stdout], [], [], 0)[0], "a process of the tree outlived the guardian"
        assert self.guardian.stdout.read() == ""
        return code, self.guardian.stderr.read()

    def close(self):
        # Any of them may end between the look and the signal.
        for descriptor in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if self.guardian.poll() is None:
            for process in psutil.Process(self.guardian.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.guardian.kill()
        self.guardian.communicate()
        for descriptor in self._pidfds.values():
            os.close(descriptor)


@pytest.fixture
def launch():
    trees = []

    def start(body, *arguments, before="", **options):
        trees.append(Tree(before + DRIVER + body, *arguments, **options))
        return trees[-1]

    yield start
    for tree in trees:
        tree.close()


@pytest.fixture
def launch_in_terminal():
    """The same as the foreground job of a shell; with the other end of its terminal."""
    trees, descriptors = [], []

    def start(body):
        keyboard, terminal = os.openpty()
        descriptors.extend((keyboard, terminal))
        trees.append(Tree(SHELL, DRIVER + body, stdin=terminal, start_new_session=True))
        return trees[-1], keyboard

    yield start
    for tree in trees:
        tree.close()
    for descriptor in descriptors:
        os.close(descriptor)


def _poll(condition):
    """Wait for a state that has no event to wait for."""
    for _ in range(6000):
        if condition():
            return
        select.select([], [], [], 0.01)
    pytest.fail("the state that was waited for did not come")


WATCH = """
folder, shared = Path(sys.argv[1]), Path(sys.argv[2])
shared.touch()
lock = FolderLock(folder)
guard.watch(folder, lock_descriptor=lock.share(guard.pid), shared_files=[shared])
lock.close()  # from here on the guardian alone holds it
"""
PAUSE = "say(os.getpid(), leave_orphan())\nwhile True:\n    signal.pause()\n"


@pytest.mark.parametrize("code", [0, 3])
def test_the_status_of_the_driver_passes_and_its_orphan_dies(launch, code):
    tree = launch(f"say(os.getpid(), leave_orphan())\ninput()\nsys.exit({code})")
    _, orphan = map(int, tree.words())
    assert tree.is_alive(orphan)

    tree.press_return()

    assert tree.end() == (code, "")


def test_the_status_passes_where_the_caller_ignores_the_end_of_children(launch):
    tree = launch("sys.exit(3)", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))

    assert tree.end() == (3, "")


def test_a_killed_driver_leaves_nothing_and_the_lock_is_held_until_then(launch, tmp_path):
    folder, shared = tmp_path / "a run", tmp_path / "weights"
    folder.mkdir()
    tree = launch(WATCH + PAUSE, folder, shared)
    driver, orphan = map(int, tree.words())

    tree.stop()
    os.kill(driver, signal.SIGKILL)
    tree.await_death(driver)
    assert tree.is_alive(orphan)
    assert shared.exists()
    with pytest.raises(RunFolderError, match=f"process id {tree.guardian.pid};"):
        FolderLock(folder)
    tree.guardian.send_signal(signal.SIGCONT)

    sentence = f"error: the run was killed (signal 9); go on with: fourstroke resume '{folder}'\n"
    assert tree.end() == (128 + 9, sentence)
    assert not shared.exists()
    FolderLock(folder).close()


def test_a_driver_without_a_folder_has_nothing_to_go_on_with(launch):
    tree = launch(PAUSE)
    driver, _ = map(int, tree.words())

    os.kill(driver, signal.SIGTERM)

    assert tree.end() == (128 + 15, "error: the run was killed (signal 15)\n")


def test_shared_memory_goes_too_where_the_driver_leaves_in_haste(launch, tmp_path):
    shared = tmp_path / "weights"
    tree = launch(WATCH + "os._exit(130)", tmp_path, shared)

    assert tree.end() == (130, "")
    assert not shared.exists()


def test_a_path_relative_to_the_driver_is_found(launch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    body = "os.chdir('elsewhere')\n" + WATCH.replace("[shared]", "[Path('weights')]") + "os._exit(0)"
    tree = launch(body, tmp_path, tmp_path / "elsewhere" / "weights", cwd=tmp_path)

    assert tree.end() == (0, "")
    assert not (tmp_path / "elsewhere" / "weights").exists()


def test_what_openmp_registered_for_the_killed_is_removed(launch):
    register = "Path(f'/dev/shm/__KMP_REGISTERED_LIB_{orphan}_1000').touch()"
    tree = launch(f"orphan = leave_orphan()\n{register}\nsay(orphan)\ninput()")
    (orphan,) = map(int, tree.words())
    registered = Path(f"/dev/shm/__KMP_REGISTERED_LIB_{orphan}_1000")
    assert registered.exists()

    tree.press_return()

    assert tree.end() == (0, "")
    assert not registered.exists()


FORK_WIDE = "def work():\n    if os.fork() == 0:\n        signal.pause()\n"
FORK_AND_RUN = "def work():\n    if os.fork():\n        os._exit(0)\n"


@pytest.mark.parametrize(("work", "num_forks"), [(FORK_WIDE, 50), (FORK_AND_RUN, 5000)])
def test_who_forks_while_it_is_killed_is_gone_too(launch, work, num_forks):
    bounded = f"for _ in range({num_forks}):\n    work()\nwhile True:\n    signal.pause()\n"
    tree = launch(f"{work}if os.fork() == 0:\n    os.setsid()\n    {bounded.replace(chr(10), chr(10) + '    ')}")

    assert tree.end() == (0, "")


def test_what_does_not_die_in_time_is_named(launch):
    unkillable = (
        "import psutil\nimport fourstroke.orchestration.guardian as module\n"
        "psutil.Process.kill = lambda self: None\nmodule.GONE_WITHIN_S = 0.1\n"
    )
    tree = launch("say(leave_orphan())\ninput()\nsys.exit(3)", before=unkillable)
    (orphan,) = map(int, tree.words())

    tree.press_return()

    assert tree.guardian.wait() == 3
    sentence = f"error: some processes of the run could not be killed; look at them with: ps -fp {orphan}\n"
    assert tree.guardian.stderr.readline() == sentence


def test_orphans_are_reaped_while_the_run_goes_on(launch):
    tree = launch("orphan = leave_orphan(lambda: os._exit(0) if sys.stdin.readline() else None)\nsay(orphan)\n" + PAUSE)
    (orphan,) = map(int, tree.words())
    driver, _ = map(int, tree.words())

    tree.press_return()

    _poll(lambda: not psutil.pid_exists(orphan))
    assert tree.is_alive(driver)


def test_the_driver_dies_with_a_killed_guardian(launch):
    body = "driver = os.getpid()\nif os.fork() == 0:\n    die_with_parent(driver)\n    say(driver, os.getpid())\n"
    tree = launch(body + "while True:\n    signal.pause()\n")
    driver, child = map(int, tree.words())

    tree.guardian.kill()

    tree.await_death(driver)
    tree.await_death(child)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_that_was_sent_is_forwarded_each_time(launch, name):
    tree = launch(
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])\nsay('ready')\n"
        f"for _ in range(2):\n    say('heard', signal.sigwait([signal.{name}]))\nsys.exit(5)\n"
    )
    assert tree.words() == ["ready"]

    for _ in range(2):
        tree.guardian.send_signal(signal.Signals[name])
        assert tree.words() == ["heard", str(int(signal.Signals[name]))]

    assert tree.end() == (5, "")


def test_the_driver_hears_the_terminals_interrupt_once(launch_in_terminal):
    tree, keyboard = launch_in_terminal(
        "heard = []\n"
        "def on_interrupt(*_):\n    heard.append(1)\n    say('interrupt')\n"
        "def on_question(*_):\n    say('heard', len(heard))\n    os._exit(5)\n"
        "signal.signal(signal.SIGINT, on_interrupt)\nsignal.signal(signal.SIGUSR1, on_question)\n"
        "say(guard.pid)\nwhile True:\n    signal.pause()\n"
    )
    (guardian,) = map(int, tree.words())

    # The guardian is held, so that what it might forward would not melt into what the driver has still to hear.
    os.kill(guardian, signal.SIGSTOP)
    assert tree.words() == ["stopped"]
    os.write(keyboard, b"\x03")
    assert tree.words() == ["interrupt"]
    os.kill(guardian, signal.SIGCONT)
    os.kill(guardian, signal.SIGUSR1)  # answered after any lower number that waits, as the interrupt is

    assert tree.words() == ["heard", "1"]
    assert tree.words() == ["ended", "5"]


def test_the_job_stops_and_continues_as_one_and_reads_the_terminal(launch_in_terminal):
    tree, keyboard = launch_in_terminal("say(guard.pid, os.getpid())\nsay(input())\nsys.exit(5)\n")
    guardian, driver = map(int, tree.words())

    os.write(keyboard, b"\x1a")
    assert tree.words() == ["stopped"]
    _poll(lambda: psutil.Process(driver).status() == psutil.STATUS_STOPPED)
    assert os.getpgid(guardian) == os.getpgid(driver) == guardian
    os.killpg(guardian, signal.SIGCONT)
    os.write(keyboard, b"typed\n")

    assert tree.words() == ["typed"]
    assert tree.words() == ["ended", "5"]
