"""S26: an infrastructure failure is not reward 0: failed members are in no baseline (NVIDIA-NeMo/Gym#2552)."""

import msgspec
import pytest

from fourstroke.config import AlgorithmConfig
from fourstroke.observability import MetricBook
from fourstroke.orchestration import measures
from fourstroke.orchestration.batching import build_batches
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.types import StopReason


def _group_of_eight():
    """Rewards 1, 0, 0; five members whose environment failed in its reset."""
    record = make_record(make_group([None, 1.0, None, None, None, 0.0, None, 0.0]))
    failed = {"stop": StopReason.FAILED, "num_sampled_tokens": 0, "versions": (), "rows": (), "failure": "reset failed"}
    episodes = (
        episode if episode.is_scored else msgspec.structs.replace(episode, **failed) for episode in record.episodes
    )
    return msgspec.structs.replace(record, episodes=tuple(episodes))


@pytest.mark.parametrize(
    ("kind", "advantages"),
    [
        ("group_centred", [0.666667, -0.333333, -0.333333]),
        ("group_standardised", [1.414214, -0.707107, -0.707107]),
    ],
)
def test_five_members_that_failed_in_reset_are_in_no_baseline_and_no_row(kind, advantages):
    algorithm = AlgorithmConfig.model_validate({"name": "grpo", "advantage": kind})

    (batch,) = build_batches([_group_of_eight()], step=1, algorithm=algorithm, max_tokens=8)

    assert [row.member for row in batch.rows] == [1, 5, 7]
    assert [row.advantage for row in batch.rows] == pytest.approx(advantages, abs=1e-6)


def test_they_are_counted_and_the_mean_is_that_of_the_scored():
    book = MetricBook(step=1)

    measures.add_groups(book, [_group_of_eight()], trained_at=0)

    record = book.record()
    assert record["reward/grade/score_mean"] == pytest.approx(0.333333, abs=1e-6)
    assert record["rollout/episode/failed_fraction"] == record["reward/grade/unscored_fraction"] == 0.625
