"""Random loss tokens, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fourstroke.algorithms.inputs import LossInputs


def random_inputs(seed: int, *, num_tokens_B: tuple[int, ...] = (3, 0, 5, 1), scale: float = 0.3) -> LossInputs:
    """Loss tokens of rows with the given numbers of them; log-ratios have the standard deviation ``scale``."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(num_tokens_B)
    current_N = -rng.gamma(2.0, 1.0, num_tokens)
    tensors = {
        "logprobs_N": current_N,
        "entropy_N": rng.gamma(2.0, 1.0, num_tokens),
        "behaviour_logprobs_N": current_N + scale * rng.standard_normal(num_tokens),
        "proximal_logprobs_N": current_N + scale * rng.standard_normal(num_tokens),
        "advantages_N": rng.standard_normal(num_tokens),
        "weight_N": rng.random(num_tokens) / max(1, num_tokens),
    }
    return LossInputs(
        **{name: torch.from_numpy(values) for name, values in tensors.items()},
        sequence_N=torch.from_numpy(np.repeat(np.arange(len(num_tokens_B)), num_tokens_B)),
        row_ids=tuple(f"row-{index}" for index in range(len(num_tokens_B))),
    )


@pytest.fixture
def make_inputs() -> Callable[..., LossInputs]:
    """The function above."""
    return random_inputs
