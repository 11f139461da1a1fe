"""AdamW over fp32 parameters, with a clip by global norm and a schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from fourstroke.config import TrainerConfig
from fourstroke.errors import DataError


class Optimiser:
    """The optimiser of a run. Every parameter has a gradient buffer that is cleared in place, never dropped.

    An update without any gradient still moves the parameters by Adam's momentum: rows that were skipped because their
    gradient is zero change nothing.

    Args:
        parameters: fp32, each with a gradient.
        config: Read for the rate and its schedule, Adam's settings and the clip.
        num_updates: Updates of the whole run, for the schedule.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, config: TrainerConfig, num_updates: int) -> None:
        """Start with empty moments."""
        self._parameters = list(parameters)
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
