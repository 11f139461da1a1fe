"""S32: the share of cut replies counts how they ended, never the batch's longest row (verl-project/verl#7817).

With 100 tokens allowed. The buggy system took each row as long as the batch is wide for a cut one: 2/3 both times.
"""

import msgspec
import pytest

from fourstroke.observability import MetricBook
from fourstroke.orchestration import measures
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.types import StopReason


def _truncated_fraction(lengths, *, cut=()):
    record = make_record(make_group([1.0] * len(lengths), reply_lengths=lengths))
    episodes = (
        msgspec.structs.replace(episode, stop=StopReason.LENGTH if episode.member in cut else StopReason.FINISHED)
        for episode in record.episodes
    )
    book = MetricBook(step=1)
    measures.add_groups(book, [msgspec.structs.replace(record, episodes=tuple(episodes))], trained_at=0)
    return book.record()["rollout/episode/truncated_fraction"]


def test_the_longest_row_of_a_batch_is_not_cut():
    assert _truncated_fraction([12, 40, 40]) == 0.0


def test_only_the_one_stopped_by_length_is_cut():
    assert _truncated_fraction([12, 100, 100], cut={1}) == pytest.approx(1 / 3)
