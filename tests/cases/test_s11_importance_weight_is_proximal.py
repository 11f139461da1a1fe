"""S11: the truncated importance weight uses the proximal log-probability, not the current one (THUDM/slime#179)."""

from __future__ import annotations

import pytest
import torch

from fourstroke.algorithms.inputs import LossInputs
from fourstroke.algorithms.losses import bind_loss
from fourstroke.algorithms.terms import LossMetric
from fourstroke.config import AlgorithmConfig


@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_the_policys_change_is_counted_once(correction: str) -> None:
    def one(value: float) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.float64)

    current = one(-0.7).requires_grad_()
    inputs = LossInputs(
        logprobs_N=current, entropy_N=one(0.0), behaviour_logprobs_N=one(-1.2), proximal_logprobs_N=one(-1.0),
        advantages_N=one(-1.0), weight_N=one(1.0), sequence_N=torch.tensor([0]), row_ids=("r",),
    )  # fmt: skip
    config = AlgorithmConfig.model_validate({"name": "grpo", "correction": correction, "correction_cap": 2.0})

    output = bind_loss(config)(inputs)
    output.loss_sum.backward()  # type: ignore[no-untyped-call]

    assert output.sums[LossMetric.IMPORTANCE_WEIGHT].item() == pytest.approx(1.221403, abs=1e-6)
    # With the advantage -1 the loss is weight * ratio = 1.221403 * 1.349859; the wrong product is 2.225541.
    assert output.loss_sum.item() == pytest.approx(1.648721, abs=1e-6)
    # The weight is a constant: the gradient is weight * ratio too, where a weight with gradient would double it.
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(1.648721, abs=1e-6)
