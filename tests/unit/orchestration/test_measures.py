"""What the controller measures, against numbers by hand."""

import math

import msgspec
import pytest

from fourstroke.algorithms import LossMetric
from fourstroke.config import load_config
from fourstroke.observability import EventKind, MetricBook
from fourstroke.orchestration import measures
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.types import Microbatch, StepStats, StopReason, Tamper, VersionRun


def _record(scores, *, index=0, version=0, lengths=None, changes=()):
    """A group's record; ``changes`` are (member, fields) of its episodes."""
    record = make_record(make_group(scores, index=index, version=version, reply_lengths=lengths))
    episodes = list(record.episodes)
    for member, fields in changes:
        episodes[member] = msgspec.structs.replace(episodes[member], **fields)
    return msgspec.structs.replace(record, episodes=tuple(episodes))


def _stats(num_tokens, **sums):
    return StepStats(sums=dict.fromkeys((metric.value for metric in LossMetric), 0.0) | sums, num_tokens=num_tokens)


def test_a_steps_groups():
    tamper = Tamper(reason="wrote", grader="g", cost_s=0.0)
    failed = {"stop": StopReason.FAILED, "num_sampled_tokens": 0, "versions": (), "failure": "no browser"}
    two_versions = (VersionRun(version=3, num_tokens=2), VersionRun(version=5, num_tokens=4))
    groups = [
        _record([1.0, 0.0, None], version=3, lengths=[6, 2, 4], changes=[(0, {"versions": two_versions})]),
        _record(
            [1.0, 1.0, None, None],
            index=1,
            version=5,
            lengths=[8, 8, 8, 8],
            changes=[(1, {"stop": StopReason.LENGTH}), (2, {"verdict": tamper}), (3, failed)],
        ),
    ]
    book = MetricBook(step=6)

    measures.add_groups(book, groups, trained_at=5)

    record = book.record()
    assert record["rollout/episode/length_mean"] == (6 + 2 + 4 + 8 + 8 + 8) / 6
    assert record["rollout/episode/truncated_fraction"] == 1 / 6
    assert record["rollout/episode/failed_fraction"] == 1 / 7
    assert record["reward/grade/score_mean"] == 3 / 4
    assert record["reward/grade/unscored_fraction"] == 2 / 7
    assert record["reward/grade/tamper_fraction"] == 1 / 7
    assert record["reward/group/mixed_fraction"] == 1 / 2
    assert (record["train/staleness/lag_mean"], record["train/staleness/lag_max"]) == (1.0, 2.0)
    # Of 2 tokens of version 3 and 4 of 5; 6 of version 3; 24 of version 5.
    assert record["train/staleness/token_lag_mean"] == (2 * 2 + 6 * 2) / (6 + 6 + 24)


def test_an_updates_passes():
    book = MetricBook(step=1)
    microbatches = [Microbatch(rows=(0, 2)), Microbatch(rows=(5,))]
    passes = [_stats(10, loss=0.5, entropy=20.0, clipped=1.0), _stats(30, loss=-0.25, entropy=60.0, clipped=3.0)]

    measures.add_passes(book, num_rows=8, microbatches=microbatches, passes=passes)
    measures.add_update(book, StepStats(sums={"grad_norm": 2.0, "learning_rate": 1e-5}, num_tokens=0))

    record = book.record()
    assert record["train/rows/skipped_fraction"] == 5 / 8
    assert record["train/loss/loss"] == 0.25
    assert record["train/loss/entropy"] == 2.0
    assert record["train/loss/clipped_fraction"] == 0.1
    assert (record["train/optim/grad_norm"], record["train/optim/learning_rate"]) == (2.0, 1e-5)


def test_an_update_without_a_pass_has_no_means_of_nothing():
    book = MetricBook(step=1)

    measures.add_passes(book, num_rows=8, microbatches=[], passes=[])

    assert book.record() == {"step": 1, "train/loss/loss": 0.0, "train/rows/skipped_fraction": 1.0}


def test_the_mismatch_is_a_mean_over_tokens():
    assert measures.mean_abs_log_ratio([_stats(10, abs_log_ratio=1.0), _stats(30, abs_log_ratio=7.0)]) == 0.2
    assert measures.mean_abs_log_ratio([]) == 0.0


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ([], 0.25),
        (["engine.dtype=float32"], 0.25),
        (["engine.dtype=float32", "trainer.compute_dtype=float32"], 1e-3),
        (["trainer.max_mismatch=0.5"], 0.5),
        (["rollout.staleness=2"], math.inf),
        (["rollout.staleness=2", "trainer.max_mismatch=0.5"], 0.5),
    ],
)
def test_the_limit_on_the_mismatch_is_the_users_or_by_dtype(overrides, limit):
    assert measures.mismatch_limit(load_config({}, overrides=overrides)) == limit


def test_a_span_counts_overlapping_activities_once():
    clock = iter([1.0, 4.0, 10.0, 12.0])
    span = measures.Span()

    with span.entered(lambda: next(clock)), span.entered(lambda: pytest.fail("asked while another went on")):
        pass
    first = span.seconds
    with span.entered(lambda: next(clock)):
        pass

    assert (first, span.seconds) == (3.0, 5.0)


def test_throughput_is_absent_where_no_time_passed():
    book = MetricBook(step=1)
    measures.add_throughput(book, num_tokens=10, seconds=0.0)
    assert book.record() == {"step": 1}

    measures.add_throughput(book, num_tokens=10, seconds=4.0)
    assert book.record() == {"step": 1, "rollout/generate/tokens_per_second": 2.5}


def test_members_without_a_score_are_told_apart():
    failed = {"stop": StopReason.FAILED, "failure": "no browser"}
    group = _record([1.0, None, None], changes=[(2, failed)])

    unscored, broken = measures.outcome_events(group, time_s=7.0)

    assert (unscored.kind, unscored.fields["episode"]) == (EventKind.EPISODE_UNSCORED, "e0000-i000000.1")
    assert (broken.kind, broken.fields) == (
        EventKind.EPISODE_FAILED,
        {"episode": "e0000-i000000.2", "detail": "no browser"},
    )
    assert unscored.time_s == broken.time_s == 7.0
