"""S07: groups go by id, never by a fixed stride (areal-project/AReaL#1419)."""

import pytest

from fourstroke.config import AlgorithmConfig
from fourstroke.orchestration.batching import build_batches
from fourstroke.testing.episodes import make_group, make_record

ALGORITHM = AlgorithmConfig.model_validate({"name": "grpo", "advantage": "group_centred"})


@pytest.mark.parametrize("failed", range(4))
def test_a_short_group_does_not_shift_the_next(failed):
    """One rollout of P failed: three rows of P and four of Q stand one after the other."""
    scores_of_p = [1.0, 0.0, 0.0]
    scores_of_p.insert(failed, None)
    p, q = (
        make_record(make_group(scores, index=index)) for index, scores in enumerate([scores_of_p, [1.0, 1.0, 0.0, 1.0]])
    )

    (batch,) = build_batches([p, q], step=1, algorithm=ALGORITHM, max_tokens=8)

    advantages = [row.advantage for row in batch.rows]
    assert advantages[:3] == pytest.approx([0.666667, -0.333333, -0.333333], abs=1e-6)
    assert advantages[3:] == [0.25, 0.25, -0.75, 0.25]
