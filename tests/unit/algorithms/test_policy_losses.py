"""Policy losses and their gradients against plain loops from their papers, and numbers worked by hand.

Each reference returns, token by token, the loss and the derivative by the token's own log-probability that the paper's
objective has; rows are whole, so a token's derivative holds what its row's ratio does to the other tokens.
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

from fourstroke.algorithms.inputs import LossInputs
from fourstroke.algorithms.losses import LOSSES, WAITING_LOSSES, bind_loss
from fourstroke.algorithms.policy_losses import POLICY_LOSSES, binary_divergence, covariance_penalty
from fourstroke.algorithms.terms import LossMetric
from fourstroke.config import BUNDLES, AlgorithmConfig

MakeInputs = Callable[..., LossInputs]
PER_EXAMPLE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
Found = tuple[list[float], list[float]]


def config_of(name: str, **terms: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"name": name, "correction": "none", **terms})


def rows_of(inputs: LossInputs) -> list[list[int]]:
    sequence = inputs.sequence_N.tolist()
    return [[i for i, row in enumerate(sequence) if row == wanted] for wanted in range(len(inputs.row_ids))]


class Columns:
    """The inputs as lists, and the log-ratios current to proximal and current to behaviour."""

    def __init__(self, inputs: LossInputs) -> None:
        self.current = inputs.logprobs_N.tolist()
        self.behaviour = inputs.behaviour_logprobs_N.tolist()
        self.proximal = inputs.proximal_logprobs_N.tolist()
        self.advantage = inputs.advantages_N.tolist()
        self.weight = inputs.weight_N.tolist()
        self.selected = inputs.is_selected_N.tolist() if inputs.is_selected_N is not None else []
        self.ratio = [math.exp(a - b) for a, b in zip(self.current, self.proximal, strict=True)]
        self.rho = [math.exp(a - b) for a, b in zip(self.current, self.behaviour, strict=True)]
        self.num = len(self.current)


def sequence_clip(inputs: LossInputs, config: AlgorithmConfig) -> Found:
    """min(s A, clip(s) A) with s the geometric mean of the row; d s / d logp of each of its tokens is s / length."""
    c, losses, slopes = Columns(inputs), [0.0] * len(inputs.logprobs_N), [0.0] * len(inputs.logprobs_N)
    for row in rows_of(inputs):
        for i in row:
            s = math.prod(c.ratio[j] for j in row) ** (1 / len(row))
            clipped = min(max(s, 1 - config.clip_low), 1 + config.clip_high)
            losses[i] = -min(s * c.advantage[i], clipped * c.advantage[i])
            if s * c.advantage[i] <= clipped * c.advantage[i]:
                for j in row:
                    slopes[j] += -c.weight[i] * c.advantage[i] * s / len(row)
    return losses, slopes


def sequence_clip_by_token(inputs: LossInputs, config: AlgorithmConfig) -> Found:
    """The same, but each token's ratio moves with its own log-probability alone."""
    c, (losses, _) = Columns(inputs), sequence_clip(inputs, config)
    slopes = [0.0] * c.num
    for row in rows_of(inputs):
        for i in row:
            s = math.prod(c.ratio[j] for j in row) ** (1 / len(row))
            if math.isclose(losses[i], -s * c.advantage[i], rel_tol=1e-12):
                slopes[i] = c.weight[i] * losses[i]
    return losses, slopes


def geometric_clip(inputs: LossInputs, config: AlgorithmConfig) -> Found:
    """-A times the product over tokens, to the power 1 / length, of min(r, 1 + high) or, for A < 0, max(r, 1 - low)."""
    c, losses, slopes = Columns(inputs), [0.0] * len(inputs.logprobs_N), [0.0] * len(inputs.logprobs_N)
    for row in rows_of(inputs):
        held = {
            j: min(c.ratio[j], 1 + config.clip_high) if c.advantage[j] > 0 else max(c.ratio[j], 1 - config.clip_low)
            for j in row
        }
        for i in row:
            losses[i] = -c.advantage[i] * math.prod(held.values()) ** (1 / len(row))
            for j in row:
                slopes[j] += c.weight[i] * losses[i] / len(row) if held[j] == c.ratio[j] else 0.0
    return losses, slopes


def by_token(token: Callable[[Columns, AlgorithmConfig, int], tuple[float, float]]) -> Callable[..., Found]:
    """A reference whose tokens do not know of each other."""

    def reference(inputs: LossInputs, config: AlgorithmConfig) -> Found:
        columns = Columns(inputs)
        found = [token(columns, config, i) for i in range(columns.num)]
        return [loss for loss, _ in found], [columns.weight[i] * slope for i, (_, slope) in enumerate(found)]

    return reference


def policy_clip(c: Columns, config: AlgorithmConfig, i: int) -> tuple[float, float]:
    clipped = min(max(c.ratio[i], 1 - config.clip_low), 1 + config.clip_high)
    is_held = clipped * c.advantage[i] < c.ratio[i] * c.advantage[i]
    return -min(c.ratio[i] * c.advantage[i], clipped * c.advantage[i]), (
        0.0 if is_held else -c.ratio[i] * c.advantage[i]
    )


def clipped_importance(c: Columns, config: AlgorithmConfig, i: int) -> tuple[float, float]:
    weight = min(max(c.ratio[i], 1 - config.clip_low), 1 + config.clip_high)
    return -weight * c.advantage[i] * c.current[i], -weight * c.advantage[i]


def soft_gate(c: Columns, config: AlgorithmConfig, i: int) -> tuple[float, float]:
    tau = config.gate_positive if c.advantage[i] > 0 else config.gate_negative
    gate = 1 / (1 + math.exp(-tau * (c.ratio[i] - 1)))
    return -c.advantage[i] * gate * 4 / tau, -c.advantage[i] * 4 * gate * (1 - gate) * c.ratio[i]


def divergence_mask(c: Columns, config: AlgorithmConfig, i: int) -> tuple[float, float]:
    p, q = math.exp(c.current[i]), math.exp(c.behaviour[i])
    distance = abs(p - q) if config.divergence == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    goes_further = (c.advantage[i] > 0 and c.rho[i] > 1) or (c.advantage[i] < 0 and c.rho[i] < 1)
    if distance > config.divergence_limit and goes_further:
        return 0.0, 0.0
    weight = min(c.rho[i], config.correction_cap)
    return -weight * c.advantage[i] * c.current[i], -weight * c.advantage[i]


def quadratic(c: Columns, config: AlgorithmConfig, i: int) -> tuple[float, float]:
    distance = c.current[i] - c.behaviour[i]
    return (
        -c.advantage[i] * c.current[i] + config.quadratic_strength / 2 * distance**2,
        -c.advantage[i] + config.quadratic_strength * distance,
    )


def covariance_clip(c: Columns, config: AlgorithmConfig, i: int) -> tuple[float, float]:
    return (0.0, 0.0) if c.selected[i] else policy_clip(c, config, i)


def kl_penalty(c: Columns, config: AlgorithmConfig, i: int) -> tuple[float, float]:
    plain = -c.ratio[i] * c.advantage[i]
    if not c.selected[i]:
        return plain, plain
    return plain + c.ratio[i] - 1 - math.log(c.ratio[i]), plain + c.ratio[i] - 1


def second_moment_mask(c: Columns, config: AlgorithmConfig, i: int) -> tuple[float, float]:
    loss = 0.0 if c.selected[i] else -c.rho[i] * c.advantage[i]
    return loss, loss


REFERENCES: dict[str, Callable[..., Found]] = {
    "policy_clip": by_token(policy_clip),
    "sequence_clip": sequence_clip,
    "sequence_clip_by_token": sequence_clip_by_token,
    "geometric_clip": geometric_clip,
    "clipped_importance": by_token(clipped_importance),
    "soft_gate": by_token(soft_gate),
    "divergence_mask": by_token(divergence_mask),
    "quadratic": by_token(quadratic),
    "covariance_clip": by_token(covariance_clip),
    "covariance_penalty": by_token(kl_penalty),
    "second_moment_mask": by_token(second_moment_mask),
}
SETTINGS: dict[str, list[dict[str, object]]] = {
    "sequence_clip": [{"name": "gspo", "clip_low": 0.1, "clip_high": 0.05}],
    "sequence_clip_by_token": [{"name": "gspo", "clip_low": 0.1, "clip_high": 0.05}],
    "geometric_clip": [{"name": "gmpo", "clip_low": 0.2, "clip_high": 0.1}],
    "clipped_importance": [{"name": "cispo", "clip_low": 0.3, "clip_high": 0.2}, {"name": "cispo", "clip_low": 1.0}],
    "soft_gate": [{"name": "sapo", "gate_negative": 2.0}],
    "divergence_mask": [
        {"name": "dppo", "divergence_limit": 0.03, "correction_cap": 1.2},
        {"name": "dppo", "divergence": "kl", "divergence_limit": 0.01},
    ],
    "quadratic": [{"name": "dro", "quadratic_strength": 0.7}],
}


def test_every_policy_loss_has_a_reference() -> None:
    waiting = {"sequence_clip_by_token", "covariance_clip", "covariance_penalty", "second_moment_mask"}
    assert set(REFERENCES) == set(POLICY_LOSSES) | waiting


@pytest.mark.parametrize("name", REFERENCES)
@PER_EXAMPLE
@given(seed=st.integers(0, 10_000))
def test_loss_and_gradient_equal_plain_loops(make_inputs: MakeInputs, name: str, seed: int) -> None:
    term = LOSSES[name] if name in LOSSES else WAITING_LOSSES[name][1]
    inputs = make_inputs(seed)
    below = {f"{name}_N": getattr(inputs, f"{name}_N") - 2 for name in ("logprobs", "behaviour_logprobs")}
    inputs = replace(inputs, **below, proximal_logprobs_N=inputs.proximal_logprobs_N - 2)  # no probability above 1
    selected_N = torch.from_numpy(np.random.default_rng(seed).random(len(inputs.logprobs_N)) < 0.4)
    for terms in SETTINGS.get(name, [{"name": "grpo"}]):
        config = config_of(**terms)  # type: ignore[arg-type]
        logprobs_N = inputs.logprobs_N.clone().requires_grad_()
        given_N = replace(inputs, logprobs_N=logprobs_N, is_selected_N=selected_N)

        loss_sum = term(given_N, config).loss_sum
        (gradient_N,) = torch.autograd.grad(loss_sum, logprobs_N)

        losses, slopes = REFERENCES[name](given_N, config)
        expected = math.fsum(w * loss for w, loss in zip(inputs.weight_N.tolist(), losses, strict=True))
        assert loss_sum.item() == pytest.approx(expected, rel=1e-12, abs=1e-13)
        np.testing.assert_allclose(gradient_N.numpy(), slopes, rtol=1e-11, atol=1e-13)


def two_tokens(ratios: tuple[float, float], advantage: float) -> LossInputs:
    """One row of two tokens with these ratios of current to proximal and to behaviour, each with the weight 1/2."""
    old_N = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    return LossInputs(
        logprobs_N=(old_N + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        entropy_N=torch.zeros_like(old_N),
        behaviour_logprobs_N=old_N,
        proximal_logprobs_N=old_N,
        advantages_N=torch.full_like(old_N, advantage),
        weight_N=torch.full_like(old_N, 0.5),
        sequence_N=torch.tensor([0, 0]),
        row_ids=("r0",),
    )


@pytest.mark.parametrize(
    ("name", "terms", "ratios", "advantage", "loss"),
    [
        # s = sqrt(1.44 * 1) = 1.2, clipped to 1.1 for a good row and not for a bad one.
        ("sequence_clip", {"name": "gspo", "clip_high": 0.1}, (1.44, 1.0), 2.0, -2.2),
        ("sequence_clip", {"name": "gspo", "clip_high": 0.1}, (1.44, 1.0), -2.0, 2.4),
        # 4 is clipped to 1.44 and 0.25 is not: sqrt(1.44 * 0.25) = 0.6. For a bad row 0.25 is clipped to 0.64: 1.6.
        ("geometric_clip", {"name": "gmpo", "clip_low": 0.36, "clip_high": 0.44}, (4.0, 0.25), 1.0, -0.6),
        ("geometric_clip", {"name": "gmpo", "clip_low": 0.36, "clip_high": 0.44}, (4.0, 0.25), -1.0, 1.6),
        # Weights 5 (of 8) and 0.5, times -log pi: (5 * (2 - log 8) + 0.5 * (2 + log 2)) / 2.
        ("clipped_importance", {"name": "cispo"}, (8.0, 0.5), 1.0, (11 - 5 * math.log(8) + 0.5 * math.log(2)) / 2),
        # The gate is 1/2 at the ratio 1, so the loss is -A * 2 / tau.
        ("soft_gate", {"name": "sapo"}, (1.0, 1.0), 1.0, -2.0),
        ("soft_gate", {"name": "sapo", "gate_negative": 4.0}, (1.0, 1.0), -1.0, 0.5),
        # e^-2 = 0.135: at the ratio 3 the probability moved by 0.27, past 0.2, at 0.5 by 0.07.
        ("divergence_mask", {"name": "dppo"}, (3.0, 0.5), 1.0, 0.5 * 0.5 * (2 + math.log(2))),
        ("divergence_mask", {"name": "dppo"}, (3.0, 3.0), -1.0, -3 * (2 - math.log(3))),
        # -A log pi + 0.25 * (log 2)^2 for each of the two.
        ("quadratic", {"name": "dro", "quadratic_strength": 0.5}, (2.0, 0.5), 1.0, 2 + 0.25 * math.log(2) ** 2),
    ],
)
def test_by_hand(
    name: str, terms: dict[str, object], ratios: tuple[float, float], advantage: float, loss: float
) -> None:
    output = LOSSES[name](two_tokens(ratios, advantage), config_of(**terms))  # type: ignore[arg-type]
    assert output.loss_sum.item() == pytest.approx(loss, rel=1e-12)


def test_with_one_advantage_a_row_both_sequence_clips_agree(make_inputs: MakeInputs) -> None:
    inputs = make_inputs(3)
    logprobs_N = inputs.logprobs_N.clone().requires_grad_()
    weight_N = 1.0 / (1 + inputs.sequence_N)
    inputs = replace(inputs, logprobs_N=logprobs_N, advantages_N=inputs.sequence_N - 1.5, weight_N=weight_N)
    config = config_of("gspo", clip_low=0.1, clip_high=0.1)

    found = [
        term(inputs, config).loss_sum for term in (LOSSES["sequence_clip"], WAITING_LOSSES["sequence_clip_by_token"][1])
    ]
    gradients = [torch.autograd.grad(loss_sum, logprobs_N)[0] for loss_sum in found]

    torch.testing.assert_close(found[0], found[1], rtol=1e-13, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", BUNDLES)
def test_on_policy_every_bundle_is_the_plain_policy_gradient(make_inputs: MakeInputs, name: str) -> None:
    """Where all three policies agree, the gradient of each bundle is ``-weight * A`` (rows of one token)."""
    inputs = make_inputs(1, num_tokens_B=(1, 1, 1, 1, 1))
    logprobs_N = inputs.logprobs_N.clone().requires_grad_()
    old_N = logprobs_N.detach()
    inputs = replace(inputs, logprobs_N=logprobs_N, proximal_logprobs_N=old_N, behaviour_logprobs_N=old_N)

    output = bind_loss(AlgorithmConfig.model_validate({"name": name}))(inputs)
    (gradient_N,) = torch.autograd.grad(output.loss_sum, logprobs_N)

    torch.testing.assert_close(gradient_N, -inputs.weight_N * inputs.advantages_N, rtol=1e-12, atol=0)
    assert set(output.sums) == set(LossMetric)


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
def test_no_ratio_overflows_in_single_precision(make_inputs: MakeInputs, name: str, log_ratio: float) -> None:
    inputs = make_inputs(1)
    values = {f"{column}_N": getattr(inputs, f"{column}_N").float() for column in
              ("logprobs", "entropy", "behaviour_logprobs", "advantages", "weight")}  # fmt: skip
    current_N = values.pop("logprobs_N")
    inputs = replace(inputs, **values, logprobs_N=current_N.requires_grad_(),
                     proximal_logprobs_N=current_N.detach() - log_ratio)  # fmt: skip

    loss_sum = bind_loss(AlgorithmConfig.model_validate({"name": name}))(inputs).loss_sum
    (gradient_N,) = torch.autograd.grad(loss_sum, current_N)

    assert bool(loss_sum.isfinite())
    assert bool(gradient_N.isfinite().all())


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_binary_divergence_by_hand(kind: str) -> None:
    current_N, behaviour_N = (torch.tensor([math.log(p)], dtype=torch.float64) for p in (0.5, 0.25))
    expected = {"tv": 0.25, "kl": 0.25 * math.log(0.5) + 0.75 * math.log(1.5)}[kind]
    assert binary_divergence(current_N, behaviour_N, kind=kind).item() == pytest.approx(expected, rel=1e-14)
    assert binary_divergence(current_N, current_N, kind=kind).item() == pytest.approx(0.0, abs=1e-16)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_a_certain_token_has_a_finite_divergence(kind: str) -> None:
    certain_N, open_N = torch.tensor([0.0]), torch.tensor([-0.5])
    assert all(
        bool(binary_divergence(a, b, kind=kind).isfinite())
        for a, b in ((certain_N, certain_N), (open_N, certain_N), (certain_N, open_N))
    )


def test_the_kl_penalty_pulls_back_in_the_direction_of_the_divergence() -> None:
    """In expectation over tokens of the proximal policy its gradient is that of KL(proximal || current)."""
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    proximal = torch.log_softmax(torch.tensor([0.0, 0.3, -0.3], dtype=torch.float64), -1)

    def inputs_of(logprobs: Tensor) -> LossInputs:
        zeros = torch.zeros_like(proximal)
        return LossInputs(
            logprobs_N=logprobs, entropy_N=zeros, behaviour_logprobs_N=proximal, proximal_logprobs_N=proximal,
            advantages_N=zeros, weight_N=zeros, sequence_N=torch.tensor([0, 1, 2]), row_ids=("a", "b", "c"),
            is_selected_N=torch.ones(3, dtype=torch.bool),
        )  # fmt: skip

    logprobs = torch.log_softmax(logits, -1)
    penalty = (proximal.exp() * covariance_penalty(inputs_of(logprobs), coefficient=1.0)[0]).sum()
    exact = (proximal.exp() * (proximal - logprobs)).sum()
    found, expected = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (penalty, exact))

    assert penalty.item() == pytest.approx(exact.item(), rel=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
