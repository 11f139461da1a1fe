"""S13, the trainer's side: temperature divides the logits, before the softmax (PrimeIntellect-ai/prime-rl#697)."""

from __future__ import annotations

import math

import pytest
import torch

from fourstroke.trainer.head import token_logprobs

LOGITS, TEMPERATURE = [2.0, 1.0, -1.0], 0.5


@pytest.mark.parametrize(("token", "expected"), [(0, -0.129109), (1, -2.129109), (2, -6.129109)])
def test_log_softmax_of_scaled_logits(token: int, expected: float) -> None:
    logprobs, _ = token_logprobs(
        torch.tensor([LOGITS], dtype=torch.float64),
        torch.eye(3, dtype=torch.float64),
        torch.tensor([token]),
        temperature=TEMPERATURE,
    )
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)
    # Against an engine that reports the same number, the ratio is 1.
    scaled = [logit / TEMPERATURE for logit in LOGITS]
    engine = scaled[token] - math.log(sum(math.exp(value) for value in scaled))
    assert math.exp(logprobs.item() - engine) == pytest.approx(1.0, abs=1e-14)
