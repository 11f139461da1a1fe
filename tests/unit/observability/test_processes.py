"""A process that was placed does not outlive the one that placed it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

_CHILD = """
import os, signal, sys
from fourstroke.observability import die_with_parent
die_with_parent(int(sys.argv[1]))
print("alive", flush=True)
signal.pause()
"""
_PARENT = f"""
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", {_CHILD!r}, str(os.getpid())])
signal.pause()
"""


def test_a_child_is_killed_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == b"alive\n"

        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()

        # The end of the pipe comes once the last process that could write into it is gone.
        assert select.select([parent.stdout], [], [], 30)[0]
        assert parent.stdout.read() == b""


def test_a_child_whose_parent_is_gone_already_is_killed_at_once() -> None:
    nobody = 1 if os.getpid() != 1 else 2
    child = subprocess.run([sys.executable, "-c", _CHILD, str(nobody)], capture_output=True, check=False)

    assert child.returncode == -signal.SIGKILL
    assert child.stdout == b""
