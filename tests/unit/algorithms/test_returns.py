"""Returns over tokens and turns against plain double loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.algorithms.returns import generalised_advantages, reward_to_go, spread_over_turns, turn_returns

rows = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), max_size=9)
factors = st.floats(0, 1)


@given(row=rows, discount=factors, trace=factors)
def test_generalised_advantages_equal_plain_loops(
    row: list[tuple[float, float, bool]], discount: float, trace: float
) -> None:
    """``A_n = sum over l of (discount * trace)^l * delta_{n+l}``, of the sampled tokens alone."""
    rewards, values, mask = (np.array([entry[k] for entry in row]) for k in range(3))
    mask = mask.astype(bool)
    sampled = [entry for entry in row if entry[2]]
    deltas = []
    for n, (reward, value, _) in enumerate(sampled):
        next_value = sampled[n + 1][1] if n + 1 < len(sampled) else 0.0
        deltas.append(reward + discount * next_value - value)
    expected = [
        sum((discount * trace) ** (m - n) * deltas[m] for m in range(n, len(deltas))) for n in range(len(deltas))
    ]

    advantages, returns = generalised_advantages(rewards, values, mask, discount=discount, trace=trace)

    np.testing.assert_allclose(advantages[mask], expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(returns[mask], np.array(expected) + values[mask], rtol=0, atol=1e-12)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@given(row=rows, discount=factors)
def test_reward_to_go_equals_plain_loops(row: list[tuple[float, float, bool]], discount: float) -> None:
    mask = np.array([entry[2] for entry in row], dtype=bool)
    sampled = [entry[0] for entry in row if entry[2]]
    expected = [sum(discount ** (m - n) * sampled[m] for m in range(n, len(sampled))) for n in range(len(sampled))]

    found = reward_to_go(np.array([entry[0] for entry in row]), mask, discount=discount)

    np.testing.assert_allclose(found[mask], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_nothing_under_the_mask_matters(garbage: float) -> None:
    mask = np.array([True, False, True])
    for filling in (0.0, garbage):
        rewards, values = np.array([1.0, filling, 2.0]), np.array([0.5, filling, 0.25])
        advantages, _ = generalised_advantages(rewards, values, mask, discount=0.5, trace=0.5)
        # 2 - 0.25 = 1.75; 1 + 0.5 * 0.25 - 0.5 + 0.25 * 1.75 = 1.0625.
        assert advantages.tolist() == [1.0625, 0.0, 1.75]


def test_turns_by_hand() -> None:
    # Three turns with rewards 1, 0, 2 and the discount 0.5: 1 + 0 + 0.5, 0 + 1, 2.
    returns = turn_returns(np.array([1.0, 0.0, 2.0]), discount=0.5)
    assert returns.tolist() == [1.5, 1.0, 2.0]

    mask = np.array([False, True, True, False, True, False, True])
    spread = spread_over_turns(returns, np.array([-9, 0, 0, 99, 1, 99, 2]), mask)
    assert spread.tolist() == [0.0, 1.5, 1.5, 0.0, 1.0, 0.0, 2.0]
