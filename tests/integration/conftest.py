"""Real runs of a tiny model by the real command, which may be sabotaged; none outlives its test."""

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml

from fourstroke.store import Ledger, RunFolder
from fourstroke.testing.run import tiny_model

SABOTAGE = Path(__file__).parent / "sabotage"
MARK = "SABOTAGE_MARK"
# For the processes of runs: Python imports it at their start, not pytest.
collect_ignore = ["sabotage"]
COMPILED = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # torch's own choice
GONE_WITHIN_S = 5.0
START_WITHIN_S = 240.0

BASE = {
    "name": "tiny",
    "num_steps": 6,
    "grader": {"use": "fourstroke.testing.environment:parity"},
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_tokens": 12},
    "trainer": {"compute_dtype": "float32", "microbatch_tokens": 512, "learning_rate": 1e-3},
    "engine": {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 16, "kv_cache_gib": 0.1},
    "evaluation": {"num_tasks": 4, "samples_per_task": 2, "pass_at": [1, 2]},
    "checkpoint": {"every_steps": 1},
}


class Running:
    """A command of ours that goes on. Its guardian is ``process``; all its processes have ``mark`` among variables."""

    def __init__(self, process, *, mark, place):
        self.process = process
        self.place = place
        self._mark = f"{MARK}={mark}".encode()

    def family(self):
        """Every living process of the run, by its variables, whoever its parent is."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if self._mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
        return [process for process in found if _is_alive(process)]

    def named(self, pattern):
        """The one process of the family whose title matches."""
        titles = {process: _title(process) for process in self.family()}
        (match,) = [process for process, title in titles.items() if re.search(pattern, title)] or [titles]
        assert isinstance(match, psutil.Process), f"no process {pattern!r} among {list(titles.values())}"
        return match

    def driver(self):
        """The guardian's fork."""
        guardian = psutil.Process(self.process.pid)
        (driver,) = [child for child in guardian.children() if child.cmdline() == guardian.cmdline()]
        return driver

    def wait_for(self, condition, *, timeout_s=START_WITHIN_S):
        """Poll a state of other processes, which have no event to wait for; fails if the run ends before."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if result := condition():
                return result
            if self.process.poll() is not None:
                pytest.fail(f"the run ended with {self.process.returncode}: {self.process.communicate()}")
            time.sleep(0.05)
        return pytest.fail("the state that was waited for did not come")

    def end(self, *, timeout_s=START_WITHIN_S):
        """Exit status, output and errors. What a person sees at the end holds no traceback, and nothing is left."""
        self.process.wait(timeout_s)
        output, errors = self.process.communicate()
        left = self.still_alive()
        assert not left, f"these outlived the run by {GONE_WITHIN_S} s: {[_title(process) for process in left]}"
        assert "Traceback" not in output + errors, output + errors
        return self.process.returncode, output, errors

    def still_alive(self):
        """What of the family lives on after the time that it has."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


class Place:
    """Where runs of one test go: a folder of their own on disk, in shared memory and for temporary files."""

    def __init__(self, folder, *, model):
        self.folder = folder
        self.model = model
        self.shared = Path(tempfile.mkdtemp(prefix="fs-", dir="/dev/shm"))
        # Sockets lie there, and the path of a socket must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="fs-", dir="/tmp"))
        # Else each place would have vLLM's kernels compiled anew.
        COMPILED.mkdir(exist_ok=True)
        (self.temporary / COMPILED.name).symlink_to(COMPILED)
        self.runs = folder / "runs"
        # Where the run's own processes see it, if that is elsewhere.
        self.run_folder_inside = None
        self.log, self.witness = folder / "kills", folder / "witness.jsonl"
        self._started = []
        self._closing = threading.Event()
        self._lock = threading.Lock()

    def train(self, *, point=None, prefix=(), variables=None, **changes):
        """Begin a run; sections in ``changes`` are merged into those of ``BASE``."""
        self.runs.mkdir(exist_ok=True)
        config = {**BASE, "runs_dir": str(self.runs), "model": {"name": str(self.model)}}
        for name, value in changes.items():
            config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
        file = self.folder / "run.yaml"
        file.write_text(yaml.safe_dump(config))
        return self.start("train", file, point=point, prefix=prefix, variables=variables)

    def resume(self, *, point=None, prefix=(), variables=None, sets=()):
        """Go on with the run."""
        return self.start(
            "resume",
            self.run_folder_inside or self.run_folder(),
            *sets,
            point=point,
            prefix=prefix,
            variables=variables,
        )

    def start(self, *arguments, point=None, prefix=(), variables=None):
        """Start a command of ours."""
        mark = f"{self.temporary.name}-{len(self._started)}"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SABOTAGE), *sys.path]),
            "FOURSTROKE_SHM": str(self.shared),
            "TMPDIR": str(self.temporary),
            "SABOTAGE_LOG": str(self.log),
            "SABOTAGE_WITNESS": str(self.witness),
            MARK: mark,
            **({"SABOTAGE_POINT": point} if point else {}),
            **(variables or {}),
        }
        with self._lock:
            assert not self._closing.is_set(), "the test is over"
            process = subprocess.Popen(
                [*map(str, prefix), sys.executable, "-m", "fourstroke.cli", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
            running = Running(process, mark=mark, place=self)
            self._started.append(running)
        return running

    def run_folder(self):
        """The run's; there is one."""
        (folder,) = [path for path in self.runs.iterdir() if (path / "run.json").exists()]
        return folder

    def found_run_folder(self):
        """The same, or None before it is there."""
        folders = list(self.runs.glob("*/run.json")) if self.runs.exists() else []
        return folders[0].parent if folders else None

    def num_steps(self):
        """Lines of metrics that the run has written."""
        folder = self.found_run_folder()
        file = folder and folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file and file.exists() else 0

    def audit(self):
        """What the ledger says now."""
        with contextlib.closing(Ledger(RunFolder.open(self.run_folder()).ledger_path, is_read_only=True)) as ledger:
            return ledger.audit()

    def kills(self):
        """The points at which the run was killed, in order."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def witnessed(self):
        """Keys of the groups that the trainer last read for each step, by step."""
        batches = [json.loads(line) for line in self.witness.read_text().splitlines()]
        return {batch["step"]: batch["groups"] for batch in sorted(batches, key=lambda batch: batch["step"])}

    def leftovers(self):
        """Files of ours in shared memory."""
        return sorted(path.name for path in self.shared.iterdir())

    def close(self):
        """Kill what is left, and remove what does not lie in the test's folder."""
        with self._lock:
            self._closing.set()
        for running in self._started:
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGKILL)
            for process in running.family():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            running.still_alive()
            running.process.communicate()
        shutil.rmtree(self.shared, ignore_errors=True)
        shutil.rmtree(self.temporary, ignore_errors=True)


def _title(process):
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return "?"


def _is_alive(process):
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """0.2 million parameters."""
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def larger_model(tmp_path_factory):
    """1.9 million parameters."""
    return tiny_model(tmp_path_factory.mktemp("model"), width=384)


@pytest.fixture
def place(tmp_path, small_model):
    """A place for the runs of one test, with the small model."""
    place = Place(tmp_path, model=small_model)
    yield place
    place.close()


@pytest.fixture(scope="module")
def make_place(tmp_path_factory):
    """Places for runs that several tests look at."""
    places = []

    def make(name, *, model):
        places.append(Place(tmp_path_factory.mktemp(name), model=model))
        return places[-1]

    yield make
    for place in places:
        place.close()
