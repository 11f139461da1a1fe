"""S06: the denominator is the optimiser step's, not the generation batch's (huggingface/trl#6024)."""

from __future__ import annotations

import numpy as np
import pytest

from fourstroke.algorithms import token_weights

TOKENS = np.array([10, 20, 30, 40, 50, 50])
SUMMED_LOSSES = np.array([5.0, 8.0, 18.0, 10.0, 30.0, 15.0])


def test_each_step_divides_by_its_own_tokens() -> None:
    losses = [
        float(token_weights(TOKENS[step], kind="token_mean", max_tokens=64) @ SUMMED_LOSSES[step])
        for step in (slice(0, 3), slice(3, 6))
    ]
    # 31/60 and 55/140; with the generation batch's 200 tokens they would be 0.155 and 0.275.
    assert losses == pytest.approx([0.516667, 0.392857], abs=1e-6)
