"""S09: reward-to-go passes through the tokens of a tool's result (verl#6376)."""

from __future__ import annotations

import numpy as np
import pytest

from fourstroke.algorithms.returns import generalised_advantages, reward_to_go

MASK = np.array([True, True, False, False, True, False, False])  # a tool's result in the middle, padding at the end


@pytest.mark.parametrize("garbage", [0.0, np.nan, 1e30])
def test_tokens_before_the_tool_get_the_reward_after_it(garbage: float) -> None:
    rewards = np.array([0.0, 0.0, garbage, garbage, 2.0, garbage, garbage])

    found = reward_to_go(rewards, MASK, discount=0.8)

    np.testing.assert_allclose(found, [1.28, 1.6, 0.0, 0.0, 2.0, 0.0, 0.0], rtol=1e-15)


def test_a_decaying_trace_does_not_decay_over_the_tool() -> None:
    rewards, values = np.array([0.0, 0.0, 9.0, 9.0, 2.0, 9.0, 9.0]), np.array([0.5, 0.25, 9.0, 9.0, 1.0, 9.0, 9.0])

    found, returns = generalised_advantages(rewards, values, MASK, discount=1.0, trace=0.5)

    # Backwards over three model tokens: 2 - 1 = 1; 1 - 0.25 + 0.5 * 1 = 1.25; 0.25 - 0.5 + 0.5 * 1.25 = 0.375.
    np.testing.assert_allclose(found[MASK], [0.375, 1.25, 1.0], rtol=1e-15)
    np.testing.assert_allclose(returns[MASK], [0.875, 1.5, 2.0], rtol=1e-15)
    assert not found[~MASK].any()
