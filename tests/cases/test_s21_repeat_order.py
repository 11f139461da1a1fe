"""S21: samples belong together by their prompt, in whatever order they arrive (PrimeIntellect-ai/prime-rl#600)."""

import asyncio

import pytest

from fourstroke.config import AlgorithmConfig
from fourstroke.observability import MetricBook
from fourstroke.orchestration import measures
from fourstroke.orchestration.batching import build_batches
from fourstroke.orchestration.buffer import GroupBuffer
from fourstroke.testing.episodes import make_group, make_record


@pytest.mark.parametrize("kind", ["group_centred", "group_standardised"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_groups_without_variance_give_zeros(kind, order):
    """P is solved by both samples and Q by none; pairs cut across them would train on how hard a prompt is."""
    records = [make_record(make_group(scores, index=index)) for index, scores in enumerate([[1.0, 1.0], [0.0, 0.0]])]

    async def buffered():
        buffer = GroupBuffer(window=2)
        for record in records:
            buffer.expect(record.id)
        for index in order:
            await buffer.put(records[index])
        return await buffer.take(2)

    groups = asyncio.run(buffered())
    algorithm = AlgorithmConfig.model_validate({"name": "grpo", "advantage": kind})
    (batch,) = build_batches(groups, step=1, algorithm=algorithm, max_tokens=8)
    book = MetricBook(step=1)
    measures.add_groups(book, groups, trained_at=0)

    assert [row.advantage for row in batch.rows] == [0.0] * 4
    assert book.record()["reward/group/mixed_fraction"] == 0.0
