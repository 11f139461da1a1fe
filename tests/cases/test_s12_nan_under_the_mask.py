"""S12: a NaN under the mask does not reach the loss; one above it names its row (OpenRLHF/OpenRLHF#1240)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fourstroke.algorithms.inputs import LossInputs, LossOutput, masked
from fourstroke.algorithms.losses import bind_loss
from fourstroke.algorithms.terms import LossMetric
from fourstroke.config import AlgorithmConfig
from fourstroke.errors import DataError


def loss_of(logprobs_BT: Tensor, old_BT: Tensor, mask_BT: Tensor) -> LossOutput:
    logprobs_N, old_N = masked(logprobs_BT, mask_BT), masked(old_BT, mask_BT)
    inputs = LossInputs(
        logprobs_N=logprobs_N, entropy_N=torch.zeros_like(old_N), behaviour_logprobs_N=old_N,
        proximal_logprobs_N=old_N, advantages_N=torch.full_like(old_N, 2.0), weight_N=torch.ones_like(old_N),
        sequence_N=mask_BT.nonzero()[:, 0], row_ids=("e0000-i000007.3/0",),
    )  # fmt: skip
    return bind_loss(AlgorithmConfig.model_validate({"name": "grpo"}))(inputs)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_under_the_mask(garbage: float) -> None:
    logprobs_BT = torch.tensor([[-0.5, -1.0]], dtype=torch.float64, requires_grad=True)
    old_BT = torch.tensor([[-0.5, garbage]], dtype=torch.float64)

    output = loss_of(logprobs_BT, old_BT, torch.tensor([[True, False]]))
    output.loss_sum.backward()  # type: ignore[no-untyped-call]

    assert output.loss_sum.item() == -2.0
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.tolist() == [[-2.0, 0.0]]
    assert output.sums[LossMetric.ABS_LOG_RATIO].item() == 0.0


def test_above_the_mask() -> None:
    logprobs_BT = torch.tensor([[-0.5, -1.0]], requires_grad=True)
    with pytest.raises(DataError, match=r"^row e0000-i000007.3/0: the behaviour log-probability .* is nan"):
        loss_of(logprobs_BT, torch.tensor([[-0.5, math.nan]]), torch.tensor([[True, True]]))
