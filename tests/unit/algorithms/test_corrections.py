"""Truncated importance weights against plain loops, by hand, and without gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourstroke.algorithms.corrections import WeightMoments, importance_weights, interpolated_proximal
from fourstroke.algorithms.inputs import LossInputs
from fourstroke.config import AlgorithmConfig

MakeInputs = Callable[..., LossInputs]


def config_with(**terms: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"name": "grpo", **terms})


def reference(inputs: LossInputs, kind: str, cap: float) -> list[float]:
    proximal, behaviour = inputs.proximal_logprobs_N.tolist(), inputs.behaviour_logprobs_N.tolist()
    sequence = inputs.sequence_N.tolist()
    weights = []
    for i in range(len(proximal)):
        if kind == "none":
            log_weight = 0.0
        elif kind == "token":
            log_weight = proximal[i] - behaviour[i]
        else:
            log_weight = sum(proximal[j] - behaviour[j] for j in range(len(proximal)) if sequence[j] == sequence[i])
        weights.append(min(math.exp(log_weight), cap))
    return weights


@pytest.mark.parametrize("kind", ["none", "token", "sequence"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 10_000), cap=st.floats(1, 3))
def test_equals_plain_loops(make_inputs: MakeInputs, kind: str, seed: int, cap: float) -> None:
    inputs = make_inputs(seed)

    weights_N, is_truncated_N = importance_weights(inputs, config_with(correction=kind, correction_cap=cap))

    expected = reference(inputs, kind, cap)
    torch.testing.assert_close(weights_N, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert is_truncated_N.tolist() == [w == cap and kind != "none" for w in expected]


def test_sequence_weight_is_the_product_of_its_tokens_by_hand(make_inputs: MakeInputs) -> None:
    # Rows of 2 and 1 tokens; token weights 1.5, 1.2 and 0.5: sequence weights 1.8, 1.8 and 0.5.
    inputs = make_inputs(0, num_tokens_B=(2, 1))
    log_weights_N = torch.tensor([1.5, 1.2, 0.5], dtype=torch.float64).log()
    inputs = replace(inputs, proximal_logprobs_N=inputs.behaviour_logprobs_N + log_weights_N)

    weights_N, _ = importance_weights(inputs, config_with(correction="sequence", correction_cap=2.0))

    torch.testing.assert_close(weights_N, torch.tensor([1.8, 1.8, 0.5], dtype=torch.float64), rtol=1e-14, atol=0)


def test_weights_carry_no_gradient(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(0)
    inputs = replace(inputs, proximal_logprobs_N=inputs.proximal_logprobs_N.requires_grad_())
    assert not importance_weights(inputs, config_with(correction="token", correction_cap=2.0))[0].requires_grad


def test_a_weight_that_overflows_is_held_by_the_cap(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(0)
    inputs = replace(inputs, proximal_logprobs_N=inputs.behaviour_logprobs_N + 1000.0)
    assert set(importance_weights(inputs, config_with(correction="sequence", correction_cap=2.0))[0].tolist()) == {2.0}


def row_values(inputs: LossInputs, kind: str) -> list[float]:
    """Ratios of proximal to behaviour: of the token, the product over its row, or the product's length-th root."""
    proximal, behaviour = inputs.proximal_logprobs_N.tolist(), inputs.behaviour_logprobs_N.tolist()
    sequence = inputs.sequence_N.tolist()
    ratios = [math.exp(a - b) for a, b in zip(proximal, behaviour, strict=True)]
    if kind == "token":
        return ratios
    values = []
    for i in range(len(ratios)):
        row = [ratios[j] for j in range(len(ratios)) if sequence[j] == sequence[i]]
        values.append(math.prod(row) ** (1 if kind == "sequence" else 1 / len(row)))
    return values


@pytest.mark.parametrize("correction", ["none", "token", "geometric"])
@pytest.mark.parametrize("rejection", ["token", "sequence", "geometric"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), low=st.floats(0, 1), high=st.none() | st.floats(1, 2))
def test_rejection_equals_plain_loops(
    make_inputs: MakeInputs, correction: str, rejection: str, seed: int, low: float, high: float | None
) -> None:
    inputs, cap = make_inputs(seed), 1.5
    config = config_with(
        correction=correction, correction_cap=cap, rejection=rejection, rejection_low=low, rejection_high=high
    )
    plain = [1.0] * 9 if correction == "none" else row_values(inputs, correction)
    bands = row_values(inputs, rejection)
    is_rejected = [band < low or (high is not None and band > high) for band in bands]

    weights_N, is_truncated_N = importance_weights(inputs, config)

    expected = [0.0 if bad else min(weight, cap) for weight, bad in zip(plain, is_rejected, strict=True)]
    torch.testing.assert_close(weights_N, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert is_truncated_N.tolist() == [w > cap or bad for w, bad in zip(plain, is_rejected, strict=True)]


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        # Rows of 2 and 1 tokens with the ratios 4, 0.5 and 0.4: products 2 and 0.4, means sqrt(2) and 0.4.
        ({"correction": "token", "correction_cap": 2.0}, [2.0, 0.5, 0.4]),  # TIS
        ({"correction": "token", "rejection": "token", "rejection_low": 0.5, "rejection_high": 5.0,
          "correction_cap": 5.0}, [4.0, 0.5, 0.0]),  # IcePop's band
        ({"correction": "sequence", "rejection": "sequence", "rejection_high": 1.5, "correction_cap": 1.5},
         [0.0, 0.0, 0.4]),  # MIS of sequences
        ({"correction": "geometric", "correction_cap": 2.0}, [math.sqrt(2), math.sqrt(2), 0.4]),
        ({"correction": "token", "correction_cap": 2.0, "rejection": "geometric", "rejection_low": 0.5},
         [2.0, 0.5, 0.0]),
    ],
)  # fmt: skip
def test_corrections_by_hand(make_inputs: MakeInputs, terms: dict[str, Any], expected: list[float]) -> None:
    inputs = make_inputs(0, num_tokens_B=(2, 1))
    ratios_N = torch.tensor([4.0, 0.5 * (1 + 1e-12), 0.4], dtype=torch.float64)
    inputs = replace(inputs, proximal_logprobs_N=inputs.behaviour_logprobs_N + ratios_N.log())

    weights_N, _ = importance_weights(inputs, config_with(**terms))

    torch.testing.assert_close(weights_N, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=0)


def test_interpolated_proximal_by_hand() -> None:
    """Ages 0, 1, 2, 4 of a token at -1 now and -2 when sampled: the line through both, one version back."""
    current_N = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    behaviour_N = torch.full((4,), -2.0, dtype=torch.float64)

    found_N = interpolated_proximal(current_N, behaviour_N, torch.tensor([0, 1, 2, 4]))

    assert found_N.tolist() == [-1.0, -2.0, -1.5, -1.25]
    assert not found_N.requires_grad


@given(log_weights=st.lists(st.floats(-3, 3), min_size=1, max_size=12), cut=st.integers(0, 12))
def test_moments_add_up_and_equal_plain_loops(log_weights: list[float], cut: int) -> None:
    weights = [math.exp(value) for value in log_weights]
    parts = [torch.tensor(part, dtype=torch.float64) for part in (log_weights[:cut], log_weights[cut:])]

    found = WeightMoments.of(parts[0]) + WeightMoments.of(parts[1])

    effective = math.fsum(weights) ** 2 / math.fsum(w * w for w in weights)
    assert found.count == len(weights)
    assert found.effective_fraction == pytest.approx(effective / len(weights), rel=1e-12)
    assert 1 / len(weights) <= found.effective_fraction * (1 + 1e-12)
    assert found.log_weight == pytest.approx(math.fsum(log_weights), abs=1e-12)
    assert found.log_weight_squared == pytest.approx(math.fsum(v * v for v in log_weights), abs=1e-12)


def test_one_weight_that_holds_all_leaves_one_sample() -> None:
    assert WeightMoments.of(torch.tensor([0.0, -100.0, -100.0, -100.0])).effective_fraction == pytest.approx(0.25)
    assert WeightMoments.of(torch.zeros(0)).effective_fraction == 1.0
