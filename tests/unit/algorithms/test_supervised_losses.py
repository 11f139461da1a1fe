"""Penalties, imitation, preferences, values and distillation against plain loops, with gradients and by hand.

Gradients by finite differences are in ``test_invariance``; those that hold a factor fixed are checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourstroke.algorithms.inputs import LossInputs, Pairs
from fourstroke.algorithms.losses import LOSSES
from fourstroke.algorithms.penalties import entropy_bonus, kl_estimates, reference_kl
from fourstroke.algorithms.supervised_losses import (
    identity_preference,
    imitation,
    preference,
    reward_comparison,
    value_error,
    weighted_distillation,
)
from fourstroke.config import AlgorithmConfig

MakeInputs = Callable[..., LossInputs]
PER_EXAMPLE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
GRPO = AlgorithmConfig.model_validate({"name": "grpo", "correction": "token", "correction_cap": 1.2})


def full_inputs(make_inputs: MakeInputs, seed: int) -> LossInputs:
    """Rows of 3, 0, 5 and 1 tokens with every optional column; rows 2 and 0, and 3 and 1, are pairs."""
    inputs, rng = make_inputs(seed), np.random.default_rng(seed + 1)

    def noise() -> Tensor:
        return torch.from_numpy(0.4 * rng.standard_normal(len(inputs.logprobs_N)))

    values_N = noise()
    return replace(
        inputs,
        reference_logprobs_N=inputs.logprobs_N + noise(),
        teacher_logprobs_N=inputs.logprobs_N + noise(),
        values_N=values_N,
        old_values_N=values_N + noise(),
        returns_N=noise(),
        row_scores_B=torch.from_numpy(rng.standard_normal(4)),
        pairs=Pairs(
            chosen_P=torch.tensor([2, 3]),
            rejected_P=torch.tensor([0, 1]),
            weight_P=torch.tensor([0.7, 0.3], dtype=torch.float64),
        ),
    )


def importance(inputs: LossInputs) -> list[float]:
    return [min(math.exp(float(w)), 1.2) for w in inputs.proximal_logprobs_N - inputs.behaviour_logprobs_N]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def margins(inputs: LossInputs) -> list[float]:
    assert inputs.reference_logprobs_N is not None
    sums = [0.0] * 4
    for row, difference in zip(
        inputs.sequence_N.tolist(), (inputs.logprobs_N - inputs.reference_logprobs_N).tolist(), strict=True
    ):
        sums[row] += difference
    return [sums[2] - sums[0], sums[3] - sums[1]]


@PER_EXAMPLE
@given(seed=st.integers(0, 10_000))
def test_losses_equal_plain_loops(make_inputs: MakeInputs, seed: int) -> None:
    inputs = full_inputs(make_inputs, seed)
    assert inputs.reference_logprobs_N is not None
    assert inputs.values_N is not None
    assert inputs.old_values_N is not None
    assert inputs.returns_N is not None
    assert inputs.row_scores_B is not None
    weights, kept = inputs.weight_N.tolist(), importance(inputs)
    distances = (inputs.logprobs_N - inputs.reference_logprobs_N).tolist()
    first, second = margins(inputs)
    errors = []
    for value, old, target in zip(
        *(column.tolist() for column in (inputs.values_N, inputs.old_values_N, inputs.returns_N)), strict=True
    ):
        clipped = old + min(max(value - old, -0.2), 0.2)
        errors.append(max((value - target) ** 2, (clipped - target) ** 2) / 2)
    scores = inputs.row_scores_B.tolist()
    expected = {
        "imitation": -math.fsum(w * v for w, v in zip(weights, inputs.logprobs_N.tolist(), strict=True)),
        "entropy": -0.3 * math.fsum(w * v for w, v in zip(weights, inputs.entropy_N.tolist(), strict=True)),
        "k1": 0.5 * math.fsum(w * k * d for w, k, d in zip(weights, kept, distances, strict=True)),
        "k2": 0.5 * math.fsum(w * k * d * d / 2 for w, k, d in zip(weights, kept, distances, strict=True)),
        "k3": 0.5 * math.fsum(w * k * (math.exp(-d) - 1 + d) for w, k, d in zip(weights, kept, distances, strict=True)),
        "value": math.fsum(w * error for w, error in zip(weights, errors, strict=True)),
        "preference": -0.7 * (0.9 * log_sigmoid(2 * first) + 0.1 * log_sigmoid(-2 * first))
        - 0.3 * (0.9 * log_sigmoid(2 * second) + 0.1 * log_sigmoid(-2 * second)),
        "identity": 0.7 * (first - 0.25) ** 2 + 0.3 * (second - 0.25) ** 2,
        "comparison": -0.7 * log_sigmoid(scores[2] - scores[0]) - 0.3 * log_sigmoid(scores[3] - scores[1]),
    }

    found = {
        "imitation": imitation(inputs),
        "entropy": entropy_bonus(inputs, GRPO.model_copy(update={"entropy_coefficient": 0.3})),
        **{
            estimator: reference_kl(inputs, GRPO, coefficient=0.5, estimator=estimator)
            for estimator in ("k1", "k2", "k3")
        },
        "value": value_error(inputs, clip=0.2),
        "preference": preference(inputs, beta=2.0, label_noise=0.1),
        "identity": identity_preference(inputs, beta=2.0),
        "comparison": reward_comparison(inputs),
    }

    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_each_estimate_has_the_gradient_of_the_divergence(make_inputs: MakeInputs, estimator: str) -> None:
    """``coefficient * weight * importance * (current - reference)`` at each token."""
    inputs = full_inputs(make_inputs, 4)
    assert inputs.reference_logprobs_N is not None
    logprobs_N = inputs.logprobs_N.clone().requires_grad_()

    loss_sum = reference_kl(replace(inputs, logprobs_N=logprobs_N), GRPO, coefficient=0.5, estimator=estimator)
    (gradient_N,) = torch.autograd.grad(loss_sum, logprobs_N)

    distances_N = inputs.logprobs_N - inputs.reference_logprobs_N
    expected_N = 0.5 * inputs.weight_N * torch.tensor(importance(inputs), dtype=torch.float64) * distances_N
    torch.testing.assert_close(gradient_N, expected_N, rtol=1e-12, atol=0)


def test_kl_estimates_by_hand() -> None:
    # d = log 2: k1 = 0.693, k2 = 0.240, k3 = 1/2 - 1 + 0.693.
    reference_N = torch.tensor([-3.0], dtype=torch.float64)
    found = {k: kl_estimates(reference_N + math.log(2), reference_N, estimator=k).item() for k in ("k1", "k2", "k3")}
    assert found == pytest.approx({"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": math.log(2) - 0.5}, rel=1e-12)


def test_distillation_is_the_policy_loss_with_the_teachers_lead_for_an_advantage(make_inputs: MakeInputs) -> None:
    inputs = full_inputs(make_inputs, 5)
    assert inputs.teacher_logprobs_N is not None
    lead_N = inputs.teacher_logprobs_N - inputs.proximal_logprobs_N

    found = weighted_distillation(inputs, GRPO)

    expected = LOSSES["policy_clip"](replace(inputs, advantages_N=lead_N), GRPO).loss_sum
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)


def test_on_policy_distillation_has_the_gradient_of_the_reverse_divergence() -> None:
    """In expectation over the policy's own tokens, of one state with three actions."""
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([0.0, 0.3, -0.3], dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    own, zeros = logprobs.detach(), torch.zeros(3, dtype=torch.float64)
    inputs = LossInputs(
        logprobs_N=logprobs, entropy_N=zeros, behaviour_logprobs_N=own, proximal_logprobs_N=own, advantages_N=zeros,
        weight_N=own.exp(), sequence_N=torch.tensor([0, 1, 2]), row_ids=("a", "b", "c"), teacher_logprobs_N=teacher,
    )  # fmt: skip

    (found,) = torch.autograd.grad(weighted_distillation(inputs, GRPO), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_preferences_by_hand(make_inputs: MakeInputs) -> None:
    """A policy that is its reference has margins of 0: log 2 for each pair, and (1 / (2 beta))^2."""
    inputs = full_inputs(make_inputs, 6)
    inputs = replace(inputs, reference_logprobs_N=inputs.logprobs_N, row_scores_B=torch.zeros(4, dtype=torch.float64))

    assert preference(inputs, beta=0.1, label_noise=0.0).item() == pytest.approx(math.log(2), rel=1e-14)
    assert identity_preference(inputs, beta=0.1).item() == pytest.approx(25.0, rel=1e-14)
    assert reward_comparison(inputs).item() == pytest.approx(math.log(2), rel=1e-14)


@pytest.mark.parametrize(("value", "loss", "slope"), [(1.5, 0.98, 0.0), (0.5, 1.125, -1.5), (2.5, 0.98, 0.0)])
def test_a_clipped_value_gets_no_gradient_towards_its_target(
    make_inputs: MakeInputs, value: float, loss: float, slope: float
) -> None:
    # Old value 0.4 + 0.2 = 0.6 at most, target 2. At 1.5 the clipped error 1.4^2 / 2 = 0.98 is the larger one.
    inputs = make_inputs(0, num_tokens_B=(1,))
    values_N = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    one_N = torch.ones(1, dtype=torch.float64)
    inputs = replace(inputs, weight_N=one_N, values_N=values_N, old_values_N=0.4 * one_N, returns_N=2 * one_N)

    loss_sum = value_error(inputs, clip=0.2)
    (gradient,) = torch.autograd.grad(loss_sum, values_N)

    assert loss_sum.item() == pytest.approx(loss, rel=1e-14)
    assert gradient.item() == pytest.approx(slope, abs=1e-15)


@pytest.mark.parametrize("value", [0.5, 2.5])
def test_without_a_clip_the_value_has_its_plain_error(make_inputs: MakeInputs, value: float) -> None:
    inputs = make_inputs(0, num_tokens_B=(1,))
    one_N = torch.ones(1, dtype=torch.float64)
    inputs = replace(inputs, weight_N=one_N, values_N=value * one_N, returns_N=2 * one_N)
    assert value_error(inputs, clip=None).item() == pytest.approx((value - 2) ** 2 / 2, rel=1e-14)
