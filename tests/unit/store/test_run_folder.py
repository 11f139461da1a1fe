"""A run folder is named, whole, locked, refuses what it cannot read, and turns a full disk into one sentence."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import msgspec
import pytest

from fourstroke.config import RunConfig, load_config
from fourstroke.errors import ConfigError, RunFolderError
from fourstroke.observability import Event, EventKind, WaitsReport
from fourstroke.store import (
    Ledger,
    PayloadWriter,
    RunFolder,
    RunStatus,
    Summary,
    read_events,
    read_metrics,
    read_summary,
    read_waits,
    write_atomic,
)
from fourstroke.store.files import write_replacing
from fourstroke.store.run_folder import code_digest
from fourstroke.types import Estimate, Wait

NOW = datetime(2026, 11, 30, 13, 30, tzinfo=UTC)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(name="quickstart", runs_dir=str(tmp_path / "runs"), seed=3)


def test_name_is_utc_time_and_name_with_a_counter(config: RunConfig) -> None:
    east = NOW.astimezone(timezone(timedelta(hours=2)))
    folders = [RunFolder.create(config, now=east) for _ in range(3)]
    assert [folder.path.name for folder in folders] == [
        "20261130T133000Z-quickstart",
        "20261130T133000Z-quickstart-2",
        "20261130T133000Z-quickstart-3",
    ]
    for folder in folders:
        folder.close()


def test_layout_and_identity(config: RunConfig) -> None:
    folder = RunFolder.create(config, now=NOW)
    Ledger(folder.ledger_path).close()
    PayloadWriter(folder.payload_dir).close()
    folder.close()
    names = {path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*")}
    assert names == {
        *("run.json", "config.yaml", "lock", "ledger.sqlite", "metrics.jsonl", "events.jsonl"),
        *("payload", "payload/segment-00000.bin", "checkpoints", "models", "evaluations", "logs"),
    }
    assert load_config(folder.config_path) == config
    identity = json.loads((folder.path / "run.json").read_bytes())
    assert set(identity) == {"schema", "fourstroke", "code_digest", "config_digest", "versions", "created"}
    assert identity["created"] == "2026-11-30T13:30:00+00:00"
    assert identity["versions"]["python"].startswith("3.")
    assert RunFolder.open(folder.path).identity == folder.identity


def test_creating_a_folder_imports_neither_torch_nor_vllm(tmp_path: Path) -> None:
    code = (
        "import sys, datetime; from fourstroke.store import RunFolder; from fourstroke.config import RunConfig\n"
        f"RunFolder.create(RunConfig(runs_dir={str(tmp_path)!r}), now=datetime.datetime.now(datetime.UTC)).close()\n"
        "assert not {'torch', 'vllm', 'ray', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_code_digest_sees_content_names_and_boundaries(tmp_path: Path) -> None:
    def digest(**files: str) -> str:
        for old in tmp_path.glob("*.py"):
            old.unlink()
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return code_digest(tmp_path)

    variants = [
        digest(a="x", b="y"),
        digest(a="x", b="z"),
        digest(a="x", c="y"),
        digest(a="xb.py", b=""),
        digest(a="x"),
    ]
    assert len(set(variants)) == len(variants)
    assert digest(b="y", a="x") == variants[0]
    (tmp_path / "notes.txt").write_text("not code")
    assert code_digest(tmp_path) == variants[0]


def test_a_second_run_on_one_folder_is_refused_with_folder_and_process(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    folder = RunFolder.create_at(path, config, now=NOW)
    with pytest.raises(RunFolderError, match=rf"^{path} is in use by a run with process id {os.getpid()};"):
        RunFolder.create_at(path, config, now=NOW)
    RunFolder.open(path).close()  # reading is free
    folder.append_metrics({"step": 0})
    folder.close()
    folder.close()
    with pytest.raises(RunFolderError, match="holds an earlier run"):
        RunFolder.create_at(path, config, now=NOW)


def test_the_lock_ends_with_a_killed_holder(config: RunConfig, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from fourstroke.store.lock import FolderLock\n"
        "lock = FolderLock(pathlib.Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(RunFolderError, match=rf"process id {holder.pid};"):
            RunFolder.create_at(tmp_path, config, now=NOW)
        holder.kill()
        holder.wait()
    RunFolder.create_at(tmp_path, config, now=NOW).close()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_newer_schema_is_refused_in_one_sentence(config: RunConfig) -> None:
    folder = RunFolder.create(config, now=NOW)
    folder.close()
    # A later layout may have other fields too; only its number is read.
    (folder.path / "run.json").write_text('{"schema": 2, "everything": "else"}')
    with pytest.raises(RunFolderError, match=r"has run folder schema 2 and Fourstroke .* reads up to 1; use a newer"):
        RunFolder.open(folder.path)


@pytest.mark.parametrize("text", ["", "{", '{"schema": "one"}', '{"schema": 1}'])
def test_a_damaged_identity_is_named(config: RunConfig, text: str) -> None:
    folder = RunFolder.create(config, now=NOW)
    folder.close()
    (folder.path / "run.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"run\.json is damaged"):
        RunFolder.open(folder.path)


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunFolderError, match="is no run folder"):
            RunFolder.open(path)


def test_a_reader_cannot_write(config: RunConfig) -> None:
    RunFolder.create(config, now=NOW).close()
    folder = RunFolder.open(Path(config.runs_dir) / "20261130T133000Z-quickstart")
    with pytest.raises(AssertionError, match="open for reading"):
        folder.append_metrics({"step": 0})


def test_records_can_be_read_while_the_run_goes_on(config: RunConfig) -> None:
    folder = RunFolder.create(config, now=NOW)
    event = Event(kind=EventKind.GROUP_DROPPED, time_s=1.5, fields={"group": "e0000-i000001", "reason": "a\nb"})
    for step in range(3):
        folder.append_metrics({"step": step, "train/loss/loss": float("nan") if step == 1 else 0.1 * step})
    folder.append_event(event)
    records = read_metrics(folder.metrics_path)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert records[1]["train/loss/loss"] != records[1]["train/loss/loss"]  # NaN
    assert records[2]["train/loss/loss"] == 0.1 * 2
    assert read_events(folder.events_path) == [event]
    folder.close()


@pytest.mark.parametrize("torn", [b"{", b'{"step":2,"train/lo', b'{"step":2}'])
def test_a_torn_last_line_is_passed_over(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":0}\n{"step":1}\n' + torn)
    assert read_metrics(path) == [{"step": 0}, {"step": 1}]


def test_damage_before_the_last_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"fault","time_s":0}\n{"kind":"fau\n{"kind":"fault","time_s":2}\n')
    with pytest.raises(RunFolderError, match=r"line 2 of .*events\.jsonl is damaged"):
        read_events(path)
    with pytest.raises(RunFolderError, match="is missing"):
        read_events(tmp_path / "none.jsonl")


def test_summary_has_exactly_its_keys(config: RunConfig) -> None:
    folder = RunFolder.create(config, now=NOW)
    summary = Summary(
        name="quickstart",
        run_folder=str(folder.path),
        status=RunStatus.INTERRUPTED,
        reason="Ctrl-C",
        before=Estimate(mean=0.1, low=0.05, high=0.15, num_tasks=200, num_samples=800),
        after=None,
        train_seconds=600.5,
        total_seconds=900.0,
        num_steps=12,
        peak_memory_bytes=5_000_000_000,
    )
    folder.write_summary(summary)
    folder.close()
    data = json.loads(folder.summary_path.read_bytes())
    assert data == {
        "name": "quickstart",
        "run_folder": str(folder.path),
        "status": "interrupted",
        "reason": "Ctrl-C",
        "before": {"mean": 0.1, "low": 0.05, "high": 0.15, "num_tasks": 200, "num_samples": 800},
        "after": None,
        "train_seconds": 600.5,
        "total_seconds": 900.0,
        "num_steps": 12,
        "peak_memory_bytes": 5_000_000_000,
    }
    assert read_summary(folder.summary_path) == summary
    folder.summary_path.write_bytes(msgspec.json.encode({"name": "x"}))
    with pytest.raises(RunFolderError, match="is no summary"):
        read_summary(folder.summary_path)


def test_atomic_write_leaves_the_old_file_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match=rf"^{path} cannot be written, since its disk is full; free some space"):
        write_atomic(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_bytes() == b"old"


def test_a_full_disk_while_a_line_is_written_names_the_file(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "full"
    path.mkdir()
    (path / "metrics.jsonl").symlink_to("/dev/full")  # a device that answers each write with "no space left"
    folder = RunFolder.create_at(path, config, now=NOW)
    with pytest.raises(RunFolderError, match=r"full/metrics\.jsonl cannot be written, since its disk is full"):
        folder.append_metrics({"step": 0})
    folder.close()


def test_a_place_that_cannot_hold_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = RunConfig(runs_dir=str(tmp_path / "file" / "runs"))
    with pytest.raises(RunFolderError, match=r"cannot be written \(Not a directory\); mend that or set runs_dir"):
        RunFolder.create(config, now=NOW)


# --- resuming -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(config: RunConfig) -> Path:
    """The folder of a run that has ended."""
    folder = RunFolder.create(config, now=NOW)
    folder.append_metrics({"step": 1})
    folder.close()
    return folder.path


def test_a_resumed_folder_is_written_on_under_the_new_configuration(config: RunConfig, ended: Path) -> None:
    before = RunFolder.open(ended).identity
    longer = load_config(config, overrides=["num_steps=7"])

    folder = RunFolder.resume(ended, longer)
    folder.append_metrics({"step": 2})
    folder.close()

    assert [record["step"] for record in read_metrics(folder.metrics_path)] == [1, 2]
    assert load_config(folder.config_path) == longer
    after = RunFolder.open(ended).identity
    assert after == folder.identity == msgspec.structs.replace(before, config_digest=after.config_digest)
    assert after.config_digest == hashlib.sha256(folder.config_path.read_bytes()).hexdigest() != before.config_digest


@pytest.mark.parametrize(
    "override", ["num_steps=7", "checkpoint.keep=5", "deadlines.group_s=9", "supervision.max_replacements=0"]
)
def test_what_decides_no_number_may_change(config: RunConfig, ended: Path, override: str) -> None:
    RunFolder.resume(ended, load_config(config, overrides=[override])).close()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seed=4", "seed = 4 cannot change when a run is resumed, since the run began with 3;"),
        ("rollout.staleness=1", "rollout.staleness = 1 cannot change"),
        ("algorithm.clip_high=0.5", "algorithm.clip_high = 0.5 cannot change"),
        ("tasks.arguments={op: add}", "tasks.arguments = {'op': 'add'} cannot change"),
        ("name=other", "name = 'other' cannot change"),
        ("deterministic=true", "deterministic = True cannot change"),
    ],
)
def test_what_decides_numbers_may_not(config: RunConfig, ended: Path, override: str, sentence: str) -> None:
    before = {path: path.read_bytes() for path in ended.glob("*.*")}

    with pytest.raises(ConfigError) as caught:
        RunFolder.resume(ended, load_config(config, overrides=[override]))

    assert sentence in str(caught.value)
    assert "what may change: num_steps, checkpoint, deadlines, supervision" in str(caught.value)
    assert {path: path.read_bytes() for path in ended.glob("*.*")} == before
    RunFolder.resume(ended, config).close()  # the lock was not kept


def test_a_run_that_goes_on_is_not_resumed_beside_itself(config: RunConfig, ended: Path) -> None:
    first = RunFolder.resume(ended, config)
    with pytest.raises(RunFolderError, match=rf"^{ended} is in use by a run with process id {os.getpid()};"):
        RunFolder.resume(ended, config)
    first.append_metrics({"step": 2})
    first.close()
    RunFolder.resume(ended, config).close()


def test_a_line_that_a_kill_tore_is_cut_off_before_the_next(config: RunConfig, ended: Path) -> None:
    with (ended / "metrics.jsonl").open("ab") as metrics, (ended / "events.jsonl").open("ab") as events:
        metrics.write(b'{"step":2,"train/lo')
        events.write(b'{"kind":"fau')

    folder = RunFolder.resume(ended, config)
    folder.append_metrics({"step": 2})
    folder.append_event(Event(kind=EventKind.FAULT, time_s=1.0, fields={}))
    folder.close()

    assert [record["step"] for record in read_metrics(folder.metrics_path)] == [1, 2]
    assert [event.kind for event in read_events(folder.events_path)] == [EventKind.FAULT]


def test_what_is_no_run_folder_cannot_be_resumed(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is no run folder"):
        RunFolder.resume(tmp_path / "missing", config)


def test_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"x":1}\n{"step":2,"x":2}\n{"step":3,"x":3}\n{"step":2,"x":null}\n{"step":3,"y":4}\n')

    first, second, third = read_metrics(path)

    assert (first, third) == ({"step": 1, "x": 1}, {"step": 3, "y": 4})
    assert second["step"] == 2
    assert math.isnan(second["x"])


def test_waits_are_read_as_they_were_written(config: RunConfig) -> None:
    folder = RunFolder.create(config, now=NOW)
    wait = Wait(part="trainer", what="a pass", waited_s=1.5, deadline_s=0.0)
    for step in (1, 2):
        report = WaitsReport(written_unix=1.8e9, pid=4711, phase="train", step=step, waits=(wait,))
        folder.write_waits(report)
    folder.close()

    assert read_waits(folder.waits_path) == report
    assert not list(folder.path.glob(".*"))
    folder.waits_path.write_bytes(b'{"pid":')
    with pytest.raises(RunFolderError, match="is damaged"):
        read_waits(folder.waits_path)
    folder.waits_path.unlink()
    with pytest.raises(RunFolderError, match="is missing"):
        read_waits(folder.waits_path)


def test_a_replacing_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "waits.json"
    write_replacing(path, b"old")
    (tmp_path / ".waits.json.tmp").symlink_to("/dev/full")

    with pytest.raises(RunFolderError, match="cannot be written, since its disk is full"):
        write_replacing(path, b"new")

    assert path.read_bytes() == b"old"
