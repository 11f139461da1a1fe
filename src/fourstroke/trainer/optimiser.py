"""AdamW over fp32 parameters, with a clip by global norm and a schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from fourstroke.config import TrainerConfig
from fourstroke.errors import DataError
from fourstroke.trainer.checkpoint import MOMENTS, TrainerState


class Optimiser:
    """The optimiser of a run. Every parameter has a gradient buffer that is cleared in place, never dropped.

    An update without any gradient still moves the parameters by Adam's momentum: rows that were skipped because their
    gradient is zero change nothing.

    Args:
        parameters: fp32, by name; in a run each has a gradient from the start, and one without is passed over.
        config: Read for the rate and its schedule, Adam's settings and the clip.
        num_updates: Updates of the whole run, for the schedule.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, config: TrainerConfig, num_updates: int) -> None:
        """Start with empty moments."""
        self._named = dict(parameters)
        self._parameters = list(self._named.values())
        self._config = config
        self._num_planned = num_updates
        self._num_updates = 0
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, *, name: str) -> tuple[float, float]:
        """Clip the gradient to ``max_grad_norm``, apply it, and clear it.

        The rate is that of :func:`learning_rate`.

        Args:
            name: What to call the step in an error.

        Returns:
            The global norm of the gradient before the clip, and the learning rate of this update.

        Raises:
            DataError: The norm is not finite. Nothing was applied; the gradient was cleared.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        grad_norm = float(torch.nn.utils.get_total_norm([grad for grad in gradients if grad is not None]))
        if not math.isfinite(grad_norm):
            self._adamw.zero_grad(set_to_none=False)
            raise DataError(
                f"{name}: the norm of the gradient is {grad_norm}, so nothing was applied; lower trainer.learning_rate "
                "or compute in float32 (trainer.compute_dtype)"
            )
        torch.nn.utils.clip_grads_with_norm_(
            self._parameters, self._config.max_grad_norm, torch.tensor(grad_norm, device=self._parameters[0].device)
        )
        self._num_updates += 1
        rate = learning_rate(self._config, update=self._num_updates, num_updates=self._num_planned)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=False)
        return grad_norm, rate

    def state(self, *, step: int) -> TrainerState:
        """Parameters, moments and counters as they are, without a copy: valid until the next :meth:`step`."""
        adam_steps: dict[str, int] = {}
        tensors: dict[str, torch.Tensor] = dict(self._named)
        for name, parameter in self._named.items():
            if held := self._adamw.state.get(parameter):
                adam_steps[name] = int(held["step"])
                tensors |= {f"{kind}.{name}": held[kind] for kind in MOMENTS}
        return TrainerState(step=step, num_updates=self._num_updates, adam_steps=adam_steps, tensors=tensors)

    @torch.no_grad()
    def restore(self, state: TrainerState) -> None:
        """Take over a state that fits the parameters; gradients are cleared, as they are after a step.

        AdamW's own ``load_state_dict`` would keep the given tensors, and kernels may give other bits at the alignment
        of a mapped file; and the state dict of an optimiser whose parameters already hold gradients is loaded as empty
        by torch's distributed helpers. So each tensor is copied into one that was allocated here.
        """
        left = dict(state.tensors)
        for name, parameter in self._named.items():
            parameter.copy_(left.pop(name))
            if name not in state.adam_steps:
                self._adamw.state.pop(parameter, None)
                continue
            held = self._adamw.state[parameter]
            held["step"] = torch.tensor(state.adam_steps[name], dtype=torch.float32, device=parameter.device)
            for kind in MOMENTS:
                if kind not in held:
                    held[kind] = torch.empty_like(parameter, requires_grad=False)
                held[kind].copy_(left.pop(f"{kind}.{name}"))
        assert not left, f"nothing took {sorted(left)}"
        self._adamw.zero_grad(set_to_none=False)
        self._num_updates = state.num_updates


def learning_rate(config: TrainerConfig, *, update: int, num_updates: int) -> float:
    """Rate of one update.

    Over the first ``w = warmup_steps`` updates it rises as ``update / w``. Then it is constant, or falls linearly:
    the first update after the warm-up has the peak, and one past the last would have 0.

    Args:
        config: Read for ``learning_rate``, ``warmup_steps`` and ``schedule``.
        update: Number of the update, from 1.
        num_updates: Updates of the whole run.

    Example:
        >>> config = TrainerConfig(learning_rate=1.0, schedule="linear")
        >>> [learning_rate(config, update=update, num_updates=4) for update in (1, 2, 3, 4)]
        [1.0, 0.75, 0.5, 0.25]
    """
    if update <= config.warmup_steps:
        return config.learning_rate * update / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    num_left, num_falling = num_updates - update + 1, num_updates - config.warmup_steps
    return config.learning_rate * max(0.0, num_left / num_falling)
