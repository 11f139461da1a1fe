"""A process dies with its parent, takes in orphans, and what OpenMP left for a killed process is removed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourstroke.observability.processes import forget_openmp

PRELUDE = "import os, signal\nfrom fourstroke.observability.processes import adopt_orphans, die_with_parent\n"


def _run(body):
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(("named", "code"), [("None", 7), ("parent", 7), ("1 << 30", -9)])
def test_a_child_goes_on_only_under_the_parent_that_it_expects(named, code):
    with _run(
        "parent = os.getpid()\n"
        "if (child := os.fork()) == 0:\n"
        f"    die_with_parent({named})\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    ) as process:
        assert int(process.stdout.read()) == code


def test_a_child_dies_when_its_parent_is_killed():
    with _run(
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    die_with_parent(parent)\n"
        "    print('ready', flush=True)\n"
        "    signal.pause()\n"
        "signal.pause()\n"
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()

        assert process.stdout.read() == ""  # the child held the pipe open


def test_an_orphan_comes_to_who_adopts():
    with _run(
        "adopt_orphans()\n"
        "if (parent := os.fork()) == 0:\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    os._exit(5)\n"
        "os.waitpid(parent, 0)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    ) as process:
        assert process.stdout.read() == "5\n"


def test_only_the_registrations_of_that_process_are_removed():
    pid = os.getpid()
    mine, other = (Path(f"/dev/shm/__KMP_REGISTERED_LIB_{number}_1000") for number in (pid, f"{pid}0"))
    for path in (mine, other):
        path.touch()
    try:
        forget_openmp(pid)

        assert (mine.exists(), other.exists()) == (False, True)
    finally:
        other.unlink()
