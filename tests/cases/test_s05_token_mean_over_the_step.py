"""S05: a token mean is over a whole optimiser step, not a mean of micro-batch means (huggingface/trl#7249)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fourstroke.algorithms import token_weights
from fourstroke.algorithms.inputs import LossInputs
from fourstroke.algorithms.losses import bind_loss
from fourstroke.config import AlgorithmConfig

LENGTHS, MEAN_LOSSES = (40, 360), (1.5, 0.25)


def tokens_of(rows: tuple[int, ...], weights_B: np.ndarray, logprobs: torch.Tensor) -> LossInputs:
    """Loss tokens at ratio 1, where the loss of a token is minus its advantage."""
    sequence_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([LENGTHS[row] for row in rows]))
    picked = torch.tensor([row for row in rows for _ in range(LENGTHS[row])])
    starts = [sum(LENGTHS[:row]) for row in rows]
    current_N = torch.cat([logprobs[start : start + LENGTHS[row]] for start, row in zip(starts, rows, strict=True)])
    return LossInputs(
        logprobs_N=current_N,
        entropy_N=torch.zeros_like(current_N).detach(),
        behaviour_logprobs_N=current_N.detach(),
        proximal_logprobs_N=current_N.detach(),
        advantages_N=-torch.tensor(MEAN_LOSSES, dtype=torch.float64)[picked],
        weight_N=torch.from_numpy(weights_B)[picked],
        sequence_N=sequence_N,
        row_ids=tuple(f"row-{row}" for row in rows),
    )


@pytest.mark.parametrize("cut", [[(0, 1)], [(0,), (1,)], [(1,), (0,)], [(1, 0)]])
def test_loss_and_gradient_are_those_of_one_batch(cut: list[tuple[int, ...]]) -> None:
    weights_B = token_weights(LENGTHS, kind="token_mean", max_tokens=512)
    loss = bind_loss(AlgorithmConfig.model_validate({"name": "grpo"}))
    logprobs = torch.full((400,), -1.0, dtype=torch.float64, requires_grad=True)

    total = sum((loss(tokens_of(rows, weights_B, logprobs)).loss_sum for rows in cut), start=torch.zeros(()))
    (gradient,) = torch.autograd.grad(total, logprobs)

    # (40 * 1.5 + 360 * 0.25) / 400; the mean of the two means would be 0.875.
    assert total.item() == pytest.approx(0.375, abs=1e-12)
    expected = torch.cat([torch.full((40,), 1.5 / 400), torch.full((360,), 0.25 / 400)]).double()
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-9)
