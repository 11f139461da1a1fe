"""S20: a resumed Adam goes on with its moments, also when its parameters hold gradients before the load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fourstroke.config import TrainerConfig
from fourstroke.trainer.checkpoint import begin_checkpoint, read_checkpoint, write_checkpoint
from fourstroke.trainer.optimiser import Optimiser

# No clip and no decay: plain Adam.
CONFIG = TrainerConfig(learning_rate=0.1, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, max_grad_norm=1e9)


class Scalars:
    """Parameters of one number each, and their optimiser."""

    def __init__(self, *, names: str, start: float, warm_up_gradient: float | None = 0.0) -> None:
        self.named = {name: nn.Parameter(torch.tensor([start])) for name in names}
        if warm_up_gradient is not None:
            for parameter in self.named.values():
                parameter.grad = torch.full_like(parameter, warm_up_gradient)
        self.optimiser = Optimiser(self.named, config=CONFIG, num_updates=4)

    def step(self, gradient: float, *, names: str) -> None:
        for name in names:
            self.named[name].grad = torch.tensor([gradient])
        self.optimiser.step(name="a step")

    def save(self, folder: Path) -> None:
        write_checkpoint(folder, self.optimiser.state(step=3), partial=begin_checkpoint(folder))

    def load(self, folder: Path) -> None:
        self.optimiser.restore(read_checkpoint(folder, shapes=dict.fromkeys(self.named, (1,))))

    @property
    def values(self) -> dict[str, float]:
        return {name: parameter.item() for name, parameter in self.named.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """w = 1, three steps with the gradient 2."""
    first = Scalars(names="w", start=1.0)
    for _ in range(3):
        first.step(2.0, names="w")
    assert first.values["w"] == pytest.approx(0.7, abs=1e-7)
    first.save(tmp_path / "step-000003")
    return tmp_path / "step-000003"


@pytest.mark.parametrize("warm_up_gradient", [None, 0.0, 5.0])
def test_the_fourth_step_goes_on(saved: Path, warm_up_gradient: float | None) -> None:
    """Fresh moments would give 0.8, in the opposite direction."""
    resumed = Scalars(names="w", start=9.0, warm_up_gradient=warm_up_gradient)

    resumed.load(saved)

    assert resumed.values["w"] == pytest.approx(0.7, abs=1e-7)
    assert resumed.named["w"].grad is None or not resumed.named["w"].grad.any()
    resumed.step(-1.0, names="w")
    assert resumed.values["w"] == pytest.approx(0.63743821, abs=1e-7)


def test_a_load_over_moments_of_another_history(saved: Path) -> None:
    resumed = Scalars(names="w", start=9.0)
    for gradient in (7.0, -3.0):
        resumed.step(gradient, names="w")

    resumed.load(saved)

    resumed.step(-1.0, names="w")
    assert resumed.values["w"] == pytest.approx(0.63743821, abs=1e-7)


def test_every_saved_entry_is_taken(saved: Path) -> None:
    resumed = Scalars(names="w", start=9.0)
    state = read_checkpoint(saved, shapes={"w": (1,)})
    # What a loader that passes over Adam's count would do: the moments stand in the state and nothing takes them.
    del state.adam_steps["w"]  # type: ignore[attr-defined]

    with pytest.raises(AssertionError, match=r"nothing took \['exp_avg.w', 'exp_avg_sq.w'\]"):
        resumed.optimiser.restore(state)


def test_a_parameter_that_never_had_a_gradient(tmp_path: Path) -> None:
    """Of u and w, w alone is trained before the save; after it both are, u from fresh moments as it would have been."""
    whole, first = (Scalars(names="uw", start=1.0, warm_up_gradient=None) for _ in range(2))
    for _ in range(3):
        whole.step(2.0, names="w")
        for parameter in (whole.named["u"],):
            parameter.grad = None
        first.step(2.0, names="w")
    first.save(tmp_path / "step-000003")
    # The resumed one even has moments for u before the load: they are not the checkpoint's.
    resumed = Scalars(names="uw", start=9.0)
    resumed.step(3.0, names="uw")

    resumed.load(tmp_path / "step-000003")

    assert resumed.values == pytest.approx({"u": 1.0, "w": 0.7}, abs=1e-7)
    for each in (whole, resumed):
        each.step(-1.0, names="uw")
    assert resumed.values == whole.values
    assert resumed.values == pytest.approx({"u": 1.1, "w": 0.63743821}, abs=1e-7)
