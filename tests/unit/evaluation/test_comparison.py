"""Comparisons of evaluations that run folders hold."""

import msgspec
import pytest

from fourstroke.config import RunConfig
from fourstroke.errors import DataError, RunFolderError
from fourstroke.evaluation import EvaluationReport, compare_runs, counted_apart, in_words, read_evaluations
from fourstroke.observability import utc_now
from fourstroke.store import RunFolder
from fourstroke.types import Estimate


def _report(name, scores, **fields):
    counts = {"num_unscored": 0, "num_tampered": 0, "num_failed": 0, "num_truncated": 0, "num_tasks_without_score": 0}
    return EvaluationReport(
        name=name,
        version=3,
        estimate=Estimate(mean=0.5, low=0.4, high=0.6, num_tasks=len(scores), num_samples=len(scores)),
        pass_at={1: 0.5},
        mean_tokens=3.0,
        seconds=1.0,
        scores=scores,
        **{**counts, **fields},
    )


@pytest.fixture
def make_run(tmp_path):
    def make(*reports):
        folder = RunFolder.create(RunConfig(name="demo", runs_dir=str(tmp_path)), now=utc_now())
        folder.close()
        for report in reports:
            (folder.evaluations_dir / f"{report.name}.json").write_bytes(msgspec.json.encode(report))
        return RunFolder.open(folder.path)

    return make


LOW = {"a": [0.0, 0.0], "b": [0.0, 1.0], "c": [0.0, 0.0], "d": [0.0, 1.0]}
HIGH = {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 1.0], "d": [1.0, 1.0]}


def test_one_run_is_compared_before_and_after(make_run):
    run = make_run(_report("after", HIGH, num_unscored=3, num_failed=2, num_truncated=4), _report("before", LOW))

    (comparison,) = compare_runs(run)

    assert (comparison.first.evaluation, comparison.second.evaluation) == ("before", "after")
    assert (comparison.found.first, comparison.found.second) == (0.25, 0.875)
    assert comparison.second.apart == {"failed": 2, "not scored": 1, "tampered": 0, "cut by length": 4}
    lines = comparison.lines()
    assert lines[1].endswith("after (version 3): 0.875, 2 failed, 1 not scored, 4 cut by length")
    # Differences 1, 0.5, 0.5, 0.5: standard error 0.125, t(3 degrees, 97.5 %) = 3.182446.
    assert "difference +0.625  95 % [+0.227, +1.023]  over 4 tasks: a difference" in lines[2]


def test_two_runs_are_compared_by_the_names_that_both_have(make_run):
    first, second = make_run(_report("before", LOW), _report("after", LOW)), make_run(_report("after", HIGH))

    (comparison,) = compare_runs(first, second)

    assert (comparison.first.run, comparison.second.run) == (first.path.name, second.path.name)
    assert comparison.first.evaluation == comparison.second.evaluation == "after"


def test_tasks_that_one_alone_has_are_counted_and_said(make_run):
    run = make_run(_report("before", {**LOW, "e": [1.0]}), _report("after", {**HIGH, "e": []}))

    (comparison,) = compare_runs(run)

    assert (comparison.found.num_tasks, comparison.found.num_only_first) == (4, 1)
    assert comparison.lines()[-1] == "  left out: 1 and 0 tasks that only one has"


def test_what_cannot_be_compared_is_said(make_run):
    with pytest.raises(RunFolderError, match="no two evaluations"):
        compare_runs(make_run(_report("before", LOW)))
    with pytest.raises(RunFolderError, match="no evaluation of one name"):
        compare_runs(make_run(_report("before", LOW)), make_run(_report("after", LOW)))
    with pytest.raises(DataError, match="there are 0"):
        compare_runs(make_run(_report("before", LOW)), make_run(_report("before", {"x": [1.0], "y": [1.0]})))


def test_a_damaged_report_names_its_file(make_run):
    run = make_run(_report("before", LOW))
    (run.evaluations_dir / "after.json").write_text("{")

    with pytest.raises(RunFolderError, match=r"after\.json is damaged"):
        compare_runs(run)
    assert list(read_evaluations(run.evaluations_dir, names=("before",))) == ["before"]


def test_counts_apart_count_nothing_twice():
    report = _report("x", LOW, num_unscored=5, num_failed=2, num_tampered=1)

    assert in_words(counted_apart(report)) == ", 2 failed, 3 not scored, 1 tampered"
