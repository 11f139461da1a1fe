"""S28: the bound of the dual clip is read, not only parsed (RLinf/RLinf#316)."""

from __future__ import annotations

import math

import pytest
import torch

from fourstroke.algorithms.policy_losses import clipped_token_losses
from fourstroke.config import AlgorithmConfig


@pytest.mark.parametrize(("bound", "expected"), [(3.0, 4.5), (None, 6.0)])
def test_a_bad_token_whose_ratio_is_4(bound: float | None, expected: float) -> None:
    config = AlgorithmConfig.model_validate({"name": "grpo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": bound})
    losses, _ = clipped_token_losses(
        torch.tensor([math.log(4)], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64), config=config
    )
    assert losses.item() == pytest.approx(expected, abs=1e-12)  # min(max(6.0, 1.8), 3 * 1.5)
