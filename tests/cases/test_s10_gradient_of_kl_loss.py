"""S10: a KL loss has the gradient of the KL, whatever estimates its value (OpenRLHF/OpenRLHF#1309)."""

from __future__ import annotations

import pytest
import torch

from fourstroke.algorithms.penalties import kl_estimates


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.094988), ("k2", 0.086815), ("k3", 0.094988)])
def test_exact_expectation_over_three_actions(estimator: str, value: float) -> None:
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.3, -0.3], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)

    estimate = (logprobs.detach().exp() * kl_estimates(logprobs, reference, estimator=estimator)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)

    assert estimate.item() == pytest.approx(value, abs=1e-6)
    assert gradient.tolist() == pytest.approx([0.120034, -0.169561, 0.049527], abs=1e-6)
