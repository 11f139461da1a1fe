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

from fourstroke.algorithms.corrections import importance_weights
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
