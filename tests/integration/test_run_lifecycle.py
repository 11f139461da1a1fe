"""Real runs of a tiny model through real vLLM and the real command: how they end, and what they leave behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fourstroke.config import RunConfig
from fourstroke.errors import RunFolderError
from fourstroke.observability import utc_now
from fourstroke.orchestration.training_run import sweep_shared_memory
from fourstroke.store import Ledger, RunFolder, RunStatus, read_events, read_metrics, read_summary
from fourstroke.testing.run import tiny_model

GONE_WITHIN_S = 5
START_WITHIN_S = 180

CONFIG = """
name: tiny
num_steps: {num_steps}
runs_dir: {runs}
model: {{name: {model}}}
grader: {{use: "fourstroke.testing.environment:parity"}}
rollout: {{groups_per_step: 2, group_size: 8, max_tokens: 8}}
trainer: {{compute_dtype: float32, microbatch_tokens: 512, learning_rate: 1e-3}}
engine: {{dtype: float32, max_model_len: 128, max_num_seqs: 8, kv_cache_gib: 0.1}}
evaluation: {{before: {evaluates}, after: {evaluates}, num_tasks: 4, samples_per_task: 2, pass_at: [1, 2]}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def launch(tmp_path, model):
    """Start a run of so many steps; whatever is left of it is killed at the end."""
    started = []

    def start(num_steps, *, evaluates="false"):
        config = tmp_path / "run.yaml"
        text = CONFIG.format(num_steps=num_steps, runs=tmp_path / "runs", model=model, evaluates=evaluates)
        config.write_text(text)
        process = psutil.Popen(
            [sys.executable, "-m", "fourstroke.cli", "train", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.is_running():
            for child in [*process.children(recursive=True), process]:
                child.kill()
        process.communicate()


def _folder(tmp_path) -> Path:
    (folder,) = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    return folder


def _wait_for(condition, timeout_s, process=None):
    """Poll a condition of other processes, which have no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (result := condition()) is not None:
            return result
        if process is not None and process.poll() is not None:
            pytest.fail(f"the run ended with {process.returncode}: {process.communicate()}")
        time.sleep(0.05)
    pytest.fail("the state that was waited for did not come")


def _first_step(tmp_path, process):
    def found():
        files = list((tmp_path / "runs").glob("*/metrics.jsonl"))
        return files[0] if files and files[0].stat().st_size else None

    return _wait_for(found, START_WITHIN_S, process)


def _all_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _named(process, pattern):
    """The run's process whose command line or title matches."""
    seen = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            seen.append(" ".join(child.cmdline()))
            if re.search(pattern, seen[-1]):
                return child
    return pytest.fail(f"no process {pattern} among {seen}")


def _shared_files():
    return set(Path("/dev/shm").glob("fourstroke-weights-*"))


def test_a_run_goes_from_evaluation_to_summary(launch, tmp_path):
    process = launch(3, evaluates="true")
    output, errors = process.communicate(timeout=START_WITHIN_S)

    assert process.returncode == 0, errors
    folder = _folder(tmp_path)
    assert output.splitlines()[-1] == f"{folder}/"
    summary = read_summary(folder / "summary.json")
    assert summary.status is RunStatus.FINISHED
    assert summary.num_steps == 3
    assert summary.before.num_tasks == summary.after.num_tasks == 4
    assert 0 < summary.train_seconds < summary.total_seconds
    assert 100e6 < summary.peak_memory_bytes < 8e9
    fields = json.loads((folder / "summary.json").read_text())
    assert {"before", "after", "train_seconds", "total_seconds", "num_steps", "peak_memory_bytes"} <= set(fields)
    ledger = Ledger(RunFolder.open(folder).ledger_path, is_read_only=True)
    audit = ledger.audit()
    ledger.close()
    assert (audit.drawn, audit.trained, audit.dropped, audit.pending, audit.balanced) == (6, 6, 0, 0, True)
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["train/staleness/lag_max"] == 0 for record in records)
    # In float32 engine and trainer agree before the first update, and after each one: the weights that were published
    # are the weights that are sampled from, the tied output matrix included.
    assert all(record["train/mismatch/mean_abs_log_ratio"] < 1e-4 for record in records)
    assert all(record["train/optim/grad_norm"] > 0 for record in records)
    assert [
        event.fields["step"] for event in read_events(folder / "events.jsonl") if event.kind == "weights_landed"
    ] == [
        1,
        2,
        3,
    ]
    assert (folder / "curves.png").stat().st_size > 10_000
    assert (folder / "checkpoints" / "step-000003" / "model.safetensors").exists()
    assert not _shared_files()

    audit_output = subprocess.run(
        [sys.executable, "-m", "fourstroke.cli", "ledger", "audit", str(folder), "--json"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert json.loads(audit_output.stdout)["balanced"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_cleanly(launch, tmp_path, number):
    process = launch(10_000)
    _first_step(tmp_path, process)
    family = [process, *process.children(recursive=True)]

    process.send_signal(number)
    left = _all_gone(family)
    _, errors = process.communicate()

    assert left == []
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    folder = _folder(tmp_path)
    assert read_summary(folder / "summary.json").status is RunStatus.INTERRUPTED
    ledger = Ledger(RunFolder.open(folder).ledger_path, is_read_only=True)
    assert ledger.audit().balanced
    ledger.close()
    assert not _shared_files()


@pytest.mark.parametrize(
    ("victim", "named"), [("VLLM", "vllm-0: process EngineCore"), ("trainer_process", "the trainer process")]
)
def test_a_dead_part_is_named_and_the_run_stops(launch, tmp_path, victim, named):
    process = launch(10_000)
    _first_step(tmp_path, process)
    family = [process, *process.children(recursive=True)]

    _named(process, victim).send_signal(signal.SIGKILL)
    left = _all_gone(family)
    _, errors = process.communicate()

    assert left == []
    assert process.returncode == 5, errors
    assert named in errors
    assert read_summary(_folder(tmp_path) / "summary.json").status is RunStatus.FAILED
    assert not _shared_files()


def test_a_killed_driver_leaves_no_process(launch, tmp_path):
    process = launch(10_000)
    _first_step(tmp_path, process)
    family = process.children(recursive=True)
    assert len(family) >= 2

    process.send_signal(signal.SIGKILL)

    assert _all_gone(family) == []
    process.communicate()
    sweep_shared_memory(Path("/dev/shm"))  # as the next run does
    assert not _shared_files()


def test_a_second_run_on_the_folder_is_refused(launch, tmp_path):
    process = launch(10_000)
    _first_step(tmp_path, process)

    with pytest.raises(RunFolderError, match=str(process.pid)):
        RunFolder.create_at(_folder(tmp_path), RunConfig(), now=utc_now())
