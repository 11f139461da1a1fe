"""S08: leave-one-out with a scale explodes where the others are all equal (NVIDIA-NeMo/RL#1518, #4158)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.algorithms import group_advantages, needs_gradient
from fourstroke.config import AlgorithmConfig
from fourstroke.orchestration.batching import build_batches
from fourstroke.testing.episodes import make_group, make_record


def test_the_odd_one_out_is_left_unscaled() -> None:
    found = group_advantages(np.array([0.2, 0.8, 0.8, 0.8, 0.8]), kind="leave_one_out_standardised")
    np.testing.assert_allclose(found, [-0.6, 0.5, 0.5, 0.5, 0.5], rtol=1e-12)


def test_rounding_of_single_precision_does_not_explode() -> None:
    found = group_advantages(np.array([0.0] + [0.7] * 7, np.float32), kind="leave_one_out_standardised")
    assert found[0] == pytest.approx(-0.7, abs=1e-7)


@given(scores=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=32))
def test_binary_rewards_are_bounded(scores: list[float]) -> None:
    found = group_advantages(np.array(scores), kind="leave_one_out_standardised")
    assert np.all(np.abs(found) <= max(1.0, math.sqrt(len(scores))) + 1e-12)


def test_no_row_of_a_mixed_group_is_filtered() -> None:
    config = AlgorithmConfig.model_validate({"name": "rloo", "advantage": "leave_one_out_standardised"})
    group = make_record(make_group([0.2, 0.8, 0.8, 0.8, 0.8]))

    (batch,) = build_batches([group], step=1, algorithm=config, max_tokens=8)

    assert needs_gradient(batch.rows, config=config) == (0, 1, 2, 3, 4)
