"""A disk or a shared memory without room: one sentence, and a run that goes on once there is some.

The full file system is a tmpfs of a few megabytes in a user and mount namespace of its own, which needs no root; where
the machine forbids such a namespace the tests are skipped.
"""

import json
import subprocess
from pathlib import Path

import pytest

from fourstroke.store import RunStatus, read_events, read_metrics, read_summary

pytestmark = pytest.mark.timeout(900)

MOUNT_AND_STAY = 'mount -t tmpfs -o size="$2",mode=700 none "$1" && echo ready && exec cat'


class Tmpfs:
    """A sized tmpfs that only processes started with ``prefix`` see, at ``inside``; a test sees it at ``outside``."""

    def __init__(self, folder, *, size):
        self.inside = folder
        folder.mkdir()
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT_AND_STAY, "sh", str(folder), size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.is_there = self._holder.stdout.readline() == "ready\n"
        self.outside = Path(f"/proc/{self._holder.pid}/root{folder}")
        self.prefix = ["nsenter", "--preserve-credentials", "--user", "--mount", "--target", self._holder.pid]

    def fill(self):
        """Leave not one byte."""
        with (self.outside / "filler").open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                while True:
                    try:
                        file.write(b"x" * size)
                    except OSError:
                        break

    def drain(self):
        (self.outside / "filler").unlink()

    def close(self):
        self._holder.kill()
        return self._holder.communicate()[1]


@pytest.fixture
def mount(tmp_path):
    """Make a tmpfs of a size."""
    made = []

    def make(name, size):
        made.append(Tmpfs(tmp_path / name, size=size))
        if not made[-1].is_there:
            pytest.skip(f"no mount in a user namespace here: {made.pop().close().strip()}")
        return made[-1]

    yield make
    for tmpfs in made:
        tmpfs.close()


def fails_with_one_sentence(running, *, code, words):
    status, _, errors = running.end()
    assert status == code, errors
    (sentence,) = errors.splitlines()
    assert sentence.startswith("error: ")
    for word in words:
        assert word in sentence
    return sentence


def audited(place, *, prefix):
    """By the command, since SQLite does not open a file by way of another process's root."""
    folder = place.run_folder_inside or place.run_folder()
    code, output, errors = place.start("ledger", "audit", folder, "--json", prefix=prefix).end()
    assert code == 0, errors
    return json.loads(output)


def goes_on_to_the_end(place, *, prefix, num_steps):
    code, _, errors = place.resume(prefix=prefix, sets=["--set", f"num_steps={num_steps}"]).end()
    assert code == 0, errors
    audit = audited(place, prefix=prefix)
    assert (audit["trained"], audit["dropped"], audit["balanced"]) == (4 * num_steps, 0, True)
    assert [record["step"] for record in read_metrics(place.run_folder() / "metrics.jsonl")] == [
        *range(1, num_steps + 1)
    ]


def fill_disk_at(place, mount, is_time):
    """Train on a small disk, fill it once it is time, and go on after there is room again."""
    disk = mount("disk", "200m")
    # Two names of one folder: the run's and the test's.
    place.runs = disk.outside / "runs"
    running = place.train(
        num_steps=10_000,
        prefix=disk.prefix,
        runs_dir=str(disk.inside / "runs"),
        evaluation={"before": False, "after": False},
        rollout={"max_tokens": 4},
    )
    running.wait_for(is_time)
    disk.fill()

    sentence = fails_with_one_sentence(running, code=4, words=["cannot be written, since its disk is full"])

    assert str(disk.inside) in sentence
    disk.drain()
    place.run_folder_inside = disk.inside / "runs" / place.run_folder().name
    if place.num_steps():
        assert audited(place, prefix=disk.prefix)["balanced"]  # before, there may be no ledger yet
    goes_on_to_the_end(place, prefix=disk.prefix, num_steps=place.num_steps() + 3)


def test_a_full_disk_is_named_and_the_run_goes_on_with_room(place, mount):
    fill_disk_at(place, mount, lambda: place.num_steps() >= 3)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 5])
def test_a_disk_may_be_full_at_any_time(place, mount, num_steps):
    def is_time():
        return place.found_run_folder() and place.num_steps() >= num_steps

    fill_disk_at(place, mount, is_time)


def test_a_full_shared_memory_is_named_and_the_run_goes_on_with_room(place, mount):
    shared = mount("shared", "4m")
    running = place.train(
        num_steps=2,
        prefix=shared.prefix,
        variables={"FOURSTROKE_SHM": str(shared.inside)},
        evaluation={"before": False, "after": False},
    )
    # After the check at start, which would have refused the run, and before the trainer makes its file.
    running.wait_for(lambda: place.found_run_folder() and (place.run_folder() / "ledger.sqlite").exists())
    shared.fill()

    fails_with_one_sentence(running, code=6, words=[str(shared.inside), "bytes of a publication", "FOURSTROKE_SHM"])

    assert [path.name for path in shared.outside.iterdir()] == ["filler"]
    assert read_summary(place.run_folder() / "summary.json").status is RunStatus.FAILED
    code, _, errors = place.resume(prefix=shared.prefix, variables={"FOURSTROKE_SHM": str(shared.inside)}).end()
    assert code == 3
    assert errors.startswith("error: shared memory has 0.00 GiB free")
    shared.drain()
    goes_on_to_the_end(place, prefix=(), num_steps=2)
    assert any(event.kind == "run_ended" for event in read_events(place.run_folder() / "events.jsonl"))
