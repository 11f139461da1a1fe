"""Losses against plain loops in float64, gradients against finite differences, and the checks on values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourstroke.algorithms.inputs import LossInputs, LossOutput, masked
from fourstroke.algorithms.losses import bind_loss
from fourstroke.algorithms.policy_losses import clipped_token_losses
from fourstroke.algorithms.terms import LossMetric
from fourstroke.config import AlgorithmConfig
from fourstroke.errors import DataError

MakeInputs = Callable[..., LossInputs]
PER_EXAMPLE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def config_with(**terms: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"name": "grpo", **terms})


def reference(inputs: LossInputs, config: AlgorithmConfig) -> dict[str, float]:
    """Loss and sums, token by token."""
    columns = {name: values.tolist() for name, values in inputs.named_values()}
    current, behaviour = columns["log-probability"], columns["behaviour log-probability"]
    proximal, sequence = columns["proximal log-probability"], inputs.sequence_N.tolist()
    sums = dict.fromkeys((metric.value for metric in LossMetric), 0.0)
    for i in range(len(current)):
        ratio, advantage = math.exp(current[i] - proximal[i]), columns["advantage"][i]
        clipped_ratio = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        loss = -min(ratio * advantage, clipped_ratio * advantage)
        is_clipped = loss != -ratio * advantage
        if config.dual_clip is not None and advantage < 0 and loss > -config.dual_clip * advantage:
            loss, is_clipped = -config.dual_clip * advantage, True
        row = [j for j in range(len(current)) if sequence[j] == sequence[i]]
        members = [i] if config.correction == "token" else row
        log_weight = sum(proximal[j] - behaviour[j] for j in members) if config.correction != "none" else 0.0
        weight = min(math.exp(log_weight), config.correction_cap)
        sums["loss"] += columns["weight"][i] * weight * loss
        sums["entropy"] += columns["entropy"][i]
        sums["log_ratio"] += current[i] - behaviour[i]
        sums["abs_log_ratio"] += abs(current[i] - behaviour[i])
        sums["clipped"] += is_clipped
        sums["importance_weight"] += weight
        sums["truncated"] += math.exp(log_weight) > config.correction_cap
    return sums


@PER_EXAMPLE
@given(
    seed=st.integers(0, 10_000),
    clips=st.tuples(st.floats(0, 0.9), st.floats(0, 1)),
    dual_clip=st.none() | st.floats(1.05, 4),
    correction=st.sampled_from(["none", "token", "sequence"]),
    cap=st.floats(1, 3),
)
def test_equals_plain_loops(
    make_inputs: MakeInputs,
    seed: int,
    clips: tuple[float, float],
    dual_clip: float | None,
    correction: str,
    cap: float,
) -> None:
    config = config_with(
        clip_low=clips[0], clip_high=clips[1], dual_clip=dual_clip, correction=correction, correction_cap=cap
    )
    inputs = make_inputs(seed)

    output = bind_loss(config)(inputs)

    expected = reference(inputs, config)
    assert float(output.loss_sum) == pytest.approx(expected["loss"], rel=1e-12, abs=1e-14)
    assert {metric.value: value.item() for metric, value in output.sums.items()} == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("correction", ["none", "token", "sequence"])
@pytest.mark.parametrize("seed", range(4))
def test_gradient_equals_finite_differences(
    make_inputs: MakeInputs, seed: int, correction: str, dual_clip: float | None
) -> None:
    inputs = make_inputs(seed)
    loss = bind_loss(config_with(dual_clip=dual_clip, correction=correction))

    def loss_of(logprobs_N: Tensor) -> Tensor:
        return loss(replace(inputs, logprobs_N=logprobs_N)).loss_sum

    assert torch.autograd.gradcheck(loss_of, (inputs.logprobs_N.clone().requires_grad_(),), atol=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.5, 1.0, -1.28, 0.0, True),  # above 1 + clip_high
        (1.5, -1.0, 1.5, 1.5, False),  # a bad token grew: pulled back in full
        (0.5, 1.0, -0.5, -0.5, False),
        (0.5, -1.0, 0.8, 0.0, True),  # below 1 - clip_low
        (4.0, -1.5, 4.5, 0.0, True),  # dual clip 3
        (math.inf, 1.0, -1.28, 0.0, True),
        (math.inf, -1.0, 3.0, 0.0, True),
        (0.0, -1.0, 0.8, 0.0, True),
        (math.inf, 0.0, 0.0, 0.0, False),
    ],
)
def test_clips_by_hand(ratio: float, advantage: float, loss: float, gradient: float, is_clipped: bool) -> None:
    log_ratio = {math.inf: 1e4, 0.0: -1e4}.get(ratio) or math.log(ratio)
    log_ratio_N = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    advantages_N = torch.tensor([advantage], dtype=torch.float64)

    losses_N, is_clipped_N = clipped_token_losses(log_ratio_N, advantages_N, config=config_with(dual_clip=3.0))
    losses_N.sum().backward()  # type: ignore[no-untyped-call]

    assert log_ratio_N.grad is not None
    assert losses_N.item() == pytest.approx(loss, rel=1e-14)
    assert log_ratio_N.grad.item() == pytest.approx(gradient, rel=1e-14)
    assert is_clipped_N.item() is is_clipped


def test_the_clip_is_measured_from_the_proximal_policy(make_inputs: MakeInputs) -> None:
    """A stale token (behaviour far away) with proximal equal to current has the ratio 1, and its full gradient."""
    inputs = make_inputs(0)
    logprobs_N = inputs.logprobs_N.clone().requires_grad_()
    inputs = replace(
        inputs,
        logprobs_N=logprobs_N,
        proximal_logprobs_N=logprobs_N.detach(),
        behaviour_logprobs_N=inputs.behaviour_logprobs_N - 0.4,
    )
    output = bind_loss(config_with(correction="none"))(inputs)
    output.loss_sum.backward()  # type: ignore[no-untyped-call]

    assert output.sums[LossMetric.CLIPPED] == 0
    torch.testing.assert_close(logprobs_N.grad, -inputs.weight_N * inputs.advantages_N, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "field", ["logprobs_N", "behaviour_logprobs_N", "proximal_logprobs_N", "advantages_N", "weight_N", "entropy_N"]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_token_without_a_number_names_its_row(make_inputs: MakeInputs, field: str, bad: float) -> None:
    inputs = make_inputs(0, num_tokens_B=(3, 0, 5, 1))
    values_N = getattr(inputs, field).clone()
    values_N[5] = bad  # the third token of row-2

    with pytest.raises(DataError, match=r"^row row-2: the .* of a loss token is"):
        bind_loss(config_with())(replace(inputs, **{field: values_N}))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_what_is_under_the_mask_changes_no_bit(garbage: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values_BT = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask_BT = torch.rand(4, 6, generator=generator) < 0.5

    def gradient_of(values_BT: Tensor) -> tuple[Tensor, Tensor]:
        values_BT = values_BT.clone().requires_grad_()
        total = masked(values_BT, mask_BT).exp().sum()
        total.backward()  # type: ignore[no-untyped-call]
        assert values_BT.grad is not None
        return total.detach(), values_BT.grad

    clean_total, clean_grad_BT = gradient_of(values_BT)
    total, grad_BT = gradient_of(torch.where(mask_BT, values_BT, garbage))

    assert torch.equal(total, clean_total)
    assert torch.equal(grad_BT, clean_grad_BT)
    assert not grad_BT[~mask_BT].any()


def selected(inputs: LossInputs, rows: list[int]) -> LossInputs:
    """The loss tokens of some rows, in the order given."""
    none = torch.zeros(0, dtype=torch.int64)
    picks = torch.cat([none, *((inputs.sequence_N == row).nonzero()[:, 0] for row in rows)])
    fields = ["logprobs_N", "entropy_N", "behaviour_logprobs_N", "proximal_logprobs_N", "advantages_N", "weight_N"]
    position = {row: index for index, row in enumerate(rows)}
    return replace(
        inputs,
        **{field: getattr(inputs, field)[picks] for field in fields},
        sequence_N=torch.tensor([position[row] for row in inputs.sequence_N[picks].tolist()], dtype=torch.int64),
        row_ids=tuple(inputs.row_ids[row] for row in rows),
    )


@PER_EXAMPLE
@given(
    seed=st.integers(0, 1000),
    ranks=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=3),
    order=st.permutations(range(6)),
    correction=st.sampled_from(["none", "token", "sequence"]),
)
def test_any_cut_into_ranks_and_micro_batches_gives_the_same_loss_and_gradient(
    make_inputs: MakeInputs, seed: int, ranks: list[list[int]], order: list[int], correction: str
) -> None:
    """Rows go to ranks and micro-batches by drawn cuts, in a drawn order; ranks and micro-batches may be empty."""
    loss = bind_loss(config_with(correction=correction, dual_clip=2.0))
    whole = make_inputs(seed, num_tokens_B=(3, 0, 5, 1, 2, 4))
    logprobs_N = whole.logprobs_N.clone().requires_grad_()
    whole = replace(whole, logprobs_N=logprobs_N)
    expected: LossOutput = loss(whole)
    (expected_grad_N,) = torch.autograd.grad(expected.loss_sum, logprobs_N)

    sizes = [size for rank in ranks for size in rank]
    microbatches, rest = [], list(order)
    for size in sizes:
        microbatches.append(rest[:size])
        rest = rest[size:]
    outputs = [loss(selected(whole, rows)) for rows in [*microbatches, rest]]
    total = sum((output.loss_sum for output in outputs), start=torch.zeros((), dtype=torch.float64))
    (grad_N,) = torch.autograd.grad(total, logprobs_N)

    assert total.item() == pytest.approx(expected.loss_sum.item(), abs=1e-12)
    torch.testing.assert_close(grad_N, expected_grad_N, rtol=0, atol=1e-14)
    for metric, value in expected.sums.items():
        assert sum(float(output.sums[metric]) for output in outputs) == pytest.approx(float(value), abs=1e-10)
