"""The sampler counts a tree, counts shared memory once, passes over the dead, and stops at once."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading

import psutil
import pytest

from fourstroke.observability import MemorySampler, tree_pss_bytes

MIB = 2**20

_CHILD = """
import mmap, os, sys
size = int(sys.argv[1])
{body}
print("ready", flush=True)
sys.stdin.readline()
"""

_PRIVATE = "held = b'x' * size"
_SHARED = """
held = mmap.mmap(-1, size)  # shared and anonymous, inherited over fork
held.write(b'x' * size)
if os.fork():
    os.wait()
    sys.exit()
held.seek(0)
assert held.read(size)[-1:] == b'x'  # maps every page here too
"""


def _growth(body: str) -> int:
    """Bytes by which the tree grew with a child that runs ``body`` with 64 MiB."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(body=body), str(64 * MIB)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        return tree_pss_bytes(child.pid)
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()


def test_memory_of_a_child_counts() -> None:
    assert 64 * MIB <= _growth(_PRIVATE) <= 96 * MIB


def test_memory_shared_by_two_processes_counts_once() -> None:
    # Twice would be at least 128 MiB. The read above makes a passing private copy, freed before the sample.
    assert 64 * MIB <= _growth(_SHARED) <= 112 * MIB


def test_a_process_that_vanishes_between_listing_and_reading_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    listed = psutil.Process(gone.pid)
    gone.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda _self, *, recursive: [listed] if recursive else [])
    assert tree_pss_bytes(os.getpid()) > MIB


def test_a_root_that_is_gone_is_zero() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert tree_pss_bytes(gone.pid) == 0


def test_a_peak_between_start_and_end_is_kept() -> None:
    with MemorySampler(os.getpid(), interval_s=0.01) as sampler:
        before = tree_pss_bytes(os.getpid())
        held = mmap.mmap(-1, 256 * MIB)
        held.write(b"x" * (256 * MIB))
        while sampler.peak_bytes < before + 200 * MIB:
            pass
        held.close()
    assert sampler.peak_bytes >= before + 200 * MIB


def test_close_does_not_wait_for_the_interval_and_takes_a_last_sample() -> None:
    with MemorySampler(os.getpid(), interval_s=3600.0) as sampler:
        held = mmap.mmap(-1, 128 * MIB)
        before = tree_pss_bytes(os.getpid())
        held.write(b"x" * (128 * MIB))
    sampler.close()
    held.close()
    # Something else of this process may be given back meanwhile.
    assert sampler.peak_bytes >= before + 64 * MIB
    assert not [thread for thread in threading.enumerate() if thread.name == "memory-sampler"]
