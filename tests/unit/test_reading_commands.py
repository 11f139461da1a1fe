"""The commands that read a run folder, in this process: what they print of it, also of what is hostile in it."""

import json

import msgspec
import pytest
from typer.testing import CliRunner

from fourstroke.cli import app
from fourstroke.config import RunConfig
from fourstroke.errors import RunFolderError
from fourstroke.observability import utc_now
from fourstroke.orchestration.training_run import summary_lines
from fourstroke.store import RunFolder, RunStatus, Summary
from fourstroke.testing.recorded_run import RecordedRun, record_run
from fourstroke.types import Estimate

HOSTILE = "a\x1b[2J\u202eb\x9b31m\x07\r\n"


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.create(RunConfig(name="demo", runs_dir=str(tmp_path)), now=utc_now())
    yield made
    made.close()


def _run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False).stdout


def _summary(folder, **fields):
    estimate = Estimate(mean=0.5, low=0.4, high=0.6, num_tasks=10, num_samples=40)
    values = {"name": "demo", "status": RunStatus.FINISHED, "reason": "", "before": None, "after": estimate}
    sizes = {"train_seconds": 61.0, "total_seconds": 99.0, "num_steps": 4, "peak_memory_bytes": 5 * 10**9}
    return Summary(run_folder=str(folder.path), **{**values, **sizes, **fields})


def test_show_prints_the_summary_again(folder):
    summary = _summary(folder)
    folder.write_summary(summary)

    shown = _run("show", folder.path)

    assert [line.split(maxsplit=1)[0] for line in shown.splitlines()] == ["run", "held-out", "training", "in", "peak"]
    for _, value in summary_lines(summary, curves=folder.curves_path):
        assert value in shown
    assert json.loads(_run("show", folder.path, "--json"))["after"]["mean"] == 0.5


def test_show_says_why_a_run_failed_and_that_harmlessly(folder):
    folder.write_summary(_summary(folder, status=RunStatus.FAILED, reason=f"group 3: {HOSTILE}"))

    shown = _run("show", folder.path)

    assert "failed" in shown
    assert r"group 3: a\x1b[2J\u202eb\x9b31m\x07\r\n" in shown


def test_show_of_a_run_that_goes_on_says_so(folder):
    with pytest.raises(RunFolderError, match="has not ended"):
        _run("show", folder.path)


def test_compare_prints_lines_or_json(folder):
    for name, score in (("before", 0.0), ("after", 1.0)):
        report = {
            **dict.fromkeys(("num_tasks_without_score", "num_unscored", "num_tampered", "num_failed"), 0),
            "name": name,
            "version": 1,
            "estimate": {"mean": score, "low": 0.0, "high": 1.0, "num_tasks": 2, "num_samples": 2},
            "pass_at": {},
            "num_truncated": 0,
            "mean_tokens": 1.0,
            "seconds": 1.0,
            "scores": {f"task-{n}": [score] for n in range(20)},
        }
        (folder.evaluations_dir / f"{name}.json").write_bytes(msgspec.json.encode(report))

    assert "difference +1.000" in _run("compare", folder.path)
    (comparison,) = json.loads(_run("compare", folder.path, folder.path, "--json"))[:1]
    assert (comparison["first"]["evaluation"], comparison["found"]["difference"]) == ("before", 0.0)


# --- episodes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    replies = ("The answer is 7", HOSTILE, "nothing " * 1_300_000)
    return record_run(tmp_path_factory.mktemp("runs"), RecordedRun(name="demo", num_steps=3, replies=replies))


def _found(recorded, *arguments):
    return json.loads(_run("episodes", recorded, "--json", *arguments))


def test_episodes_are_the_newest_first_and_no_more_than_asked(recorded):
    found = _found(recorded, "--limit", 5)

    assert len(found["episodes"]) == 5
    assert found["has_more"] is True
    keys = [episode["row"]["key"] for episode in found["episodes"]]
    assert keys == sorted(keys, reverse=True)
    assert not _found(recorded, "--limit", 1000)["has_more"]


def test_each_filter_holds_for_all_that_it_finds_and_finds_all_that_hold(recorded):
    rows = [(one["row"], one["reply"]) for one in _found(recorded, "--limit", 1000)["episodes"]]
    task = rows[0][0]["task_id"]
    for arguments, holds in (
        (("--step", 2), lambda row, _: row["step"] == 2),
        (("--min-score", 1), lambda row, _: row["score"] is not None and row["score"] >= 1),
        (("--max-score", 0.5), lambda row, _: row["score"] is not None and row["score"] <= 0.5),
        (("--stop", "length"), lambda row, _: row["stop"] == "length"),
        (("--unscored",), lambda row, _: row["verdict"] == "unscored"),
        (("--task", task), lambda row, _: row["task_id"] == task),
        (("--text", "ANSWER IS"), lambda _, reply: "answer is" in reply.lower()),
        (("--text", "answer is", "--step", 1), lambda row, reply: row["step"] == 1 and "answer is" in reply.lower()),
    ):
        expected = [row for row, reply in rows if holds(row, reply)]
        found = [one["row"] for one in _found(recorded, "--limit", 1000, *arguments)["episodes"]]
        assert found == expected, arguments
        assert 0 < len(found) < len(rows), arguments


def test_hostile_replies_are_lines_without_a_control_character(recorded):
    shown = _run("episodes", recorded, "--limit", 1000)

    assert r"  a\x1b[2J\u202eb\x9b31m\x07\r\n" in shown
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "more characters)" in shown
    assert max(len(line) for line in shown.splitlines()) < 300


def test_episodes_whose_payload_is_gone_are_listed_with_the_reason(tmp_path):
    path = record_run(tmp_path, RecordedRun(name="demo", num_steps=1))
    for segment in (path / "payload").iterdir():
        segment.unlink()

    assert "the file is missing" in _run("episodes", path, "--limit", 1)
    assert _run("episodes", path, "--text", "answer") == "no episode matches\n"
