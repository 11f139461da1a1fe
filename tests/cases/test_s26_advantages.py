"""S26: an infrastructure failure is not reward 0: failed members are in no baseline (NVIDIA-NeMo/Gym#2552)."""

from __future__ import annotations

import numpy as np
import pytest

from fourstroke.algorithms import group_advantages
from fourstroke.types import (
    Draw,
    Episode,
    GradedEpisode,
    Group,
    Scored,
    StopReason,
    Timings,
    Unscored,
    Verdict,
)


def member(index: int, verdict: Verdict) -> GradedEpisode:
    episode = Episode(
        id=f"g.{index}", group="g", member=index, task_id="t", attempt=0, spans=(), stop=StopReason.FINISHED,
        messages=(), timings=Timings(generate_s=0.0),
    )  # fmt: skip
    return GradedEpisode(episode=episode, verdict=verdict)


def test_five_members_that_failed_in_reset_are_in_no_baseline() -> None:
    scored = [Scored(score=s, components={}, reason="", grader="g", cost_s=0.0) for s in (1.0, 0.0, 0.0)]
    failed = [Unscored(reason="environment", detail="reset failed", grader="g", cost_s=0.0)] * 5
    verdicts: list[Verdict] = [failed[0], scored[0], *failed[1:4], scored[1], failed[4], scored[2]]
    group = Group(
        draw=Draw(epoch=0, index=0, task_id="t", seed=0),
        members=tuple(member(index, verdict) for index, verdict in enumerate(verdicts)),
        admitted_version=0,
    )

    scores_G = group.scores_G

    assert [graded.episode.member for graded in group.scored] == [1, 5, 7]
    assert scores_G.mean() == pytest.approx(0.333333, abs=1e-6)
    centred = group_advantages(scores_G, kind="group_centred")
    standardised = group_advantages(scores_G, kind="group_standardised")
    assert centred == pytest.approx(np.array([0.666667, -0.333333, -0.333333]), abs=1e-6)
    assert standardised == pytest.approx(np.array([1.414214, -0.707107, -0.707107]), abs=1e-6)
