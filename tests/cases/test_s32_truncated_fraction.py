"""S32: cut and full-length shares are measured against the configured maximum, never the batch's longest row."""

import numpy as np
import pytest

from fourstroke.evaluation import length_stats
from fourstroke.types import Episode, MaskReason, Span, StopReason, Timings, VersionRun


def episode(num_tokens: int, stop: StopReason = StopReason.FINISHED) -> Episode:
    prompt = Span(
        parent=-1,
        ids=np.zeros(500, np.int32),
        logprobs=np.empty(0, np.float32),
        reason=MaskReason.PROMPT,
        versions=(),
        engine="",
    )
    reply = Span(
        parent=0,
        ids=np.zeros(num_tokens, np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        reason=MaskReason.SAMPLED,
        versions=(VersionRun(version=0, num_tokens=num_tokens),),
        engine="fake",
    )
    return Episode(
        id="g.0",
        group="g",
        member=0,
        task_id="t",
        attempt=0,
        spans=(prompt, reply),
        stop=stop,
        messages=(),
        timings=Timings(generate_s=0.0),
    )


def test_the_longest_row_of_a_batch_is_not_cut() -> None:
    stats = length_stats([episode(12), episode(40), episode(40)], max_tokens=100)

    assert stats.truncated_fraction == 0.0
    assert stats.at_cap_fraction == 0.0
    assert stats.mean_tokens == pytest.approx(92 / 3)


def test_only_the_one_stopped_by_length_is_cut() -> None:
    stats = length_stats([episode(12), episode(100, StopReason.LENGTH), episode(100)], max_tokens=100)

    assert stats.truncated_fraction == pytest.approx(1 / 3)
    assert stats.at_cap_fraction == pytest.approx(2 / 3)
