"""AdamW against plain loops, the clip, the warm-up, and a gradient that is no number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fourstroke.config import TrainerConfig
from fourstroke.errors import DataError
from fourstroke.trainer.optimiser import Optimiser, learning_rate


def parameters(*values: float) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.tensor([value])) for value in values]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    return made


def named(params: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    return {f"w{index}": parameter for index, parameter in enumerate(params)}


def set_gradient(params: list[nn.Parameter], *gradients: float) -> None:
    for parameter, gradient in zip(params, gradients, strict=True):
        assert parameter.grad is not None
        parameter.grad.fill_(gradient)


def test_equals_adamw_in_plain_loops() -> None:
    config = TrainerConfig(
        learning_rate=0.1, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.5, max_grad_norm=2.5, warmup_steps=2
    )
    params = parameters(1.0, -2.0)
    optimiser = Optimiser(named(params), config=config, num_updates=10)
    weights, first, second = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for k, gradients in enumerate([(3.0, 4.0), (0.5, -1.0), (0.0, 0.0), (30.0, 40.0)], start=1):
        set_gradient(params, *gradients)
        norm, rate = optimiser.step(name=f"step {k}")

        assert norm == pytest.approx(math.hypot(*gradients), rel=1e-6)
        assert rate == pytest.approx(0.1 * min(1, k / 2))
        for i, gradient in enumerate(gradients):
            clipped = gradient * min(1.0, 2.5 / (math.hypot(*gradients) + 1e-6))
            first[i] = 0.8 * first[i] + 0.2 * clipped
            second[i] = 0.9 * second[i] + 0.1 * clipped**2
            update = first[i] / (1 - 0.8**k) / (math.sqrt(second[i] / (1 - 0.9**k)) + 1e-3)
            weights[i] -= rate * (0.5 * weights[i] + update)
        assert [parameter.item() for parameter in params] == pytest.approx(weights, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_applies_nothing(bad: float) -> None:
    params = parameters(1.0, 2.0)
    optimiser = Optimiser(named(params), config=TrainerConfig(learning_rate=0.1, weight_decay=0.5), num_updates=10)
    set_gradient(params, 1.0, bad)

    with pytest.raises(DataError, match=r"^step 12: the norm of the gradient is (nan|inf)"):
        optimiser.step(name="step 12")

    assert [parameter.item() for parameter in params] == [1.0, 2.0]
    assert [parameter.grad.item() for parameter in params if parameter.grad is not None] == [0.0, 0.0]
    set_gradient(params, 1.0, 1.0)
    assert math.isfinite(optimiser.step(name="step 13")[0])


def test_the_gradient_is_cleared_in_place() -> None:
    params = parameters(1.0)
    buffer = params[0].grad
    set_gradient(params, 1.0)
    Optimiser(named(params), config=TrainerConfig(), num_updates=10).step(name="step 0")
    assert buffer is not None
    assert params[0].grad is buffer
    assert buffer.item() == 0.0


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "expected"),
    [
        ("constant", 0, [8.0] * 6),
        ("constant", 2, [4.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
        ("linear", 0, [8.0, 8.0 * 5 / 6, 8.0 * 4 / 6, 4.0, 8.0 * 2 / 6, 8.0 / 6]),
        ("linear", 2, [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]),
        ("linear", 6, [8.0 * k / 6 for k in range(1, 7)]),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule: str, warmup_steps: int, expected: list[float]) -> None:
    config = TrainerConfig.model_validate({"learning_rate": 8.0, "schedule": schedule, "warmup_steps": warmup_steps})
    rates = [learning_rate(config, update=update, num_updates=6) for update in range(1, 7)]
    assert rates == pytest.approx(expected, rel=1e-15)


def test_a_run_that_goes_past_its_plan_has_rate_0() -> None:
    config = TrainerConfig(learning_rate=8.0, schedule="linear")
    assert learning_rate(config, update=8, num_updates=6) == 0.0
