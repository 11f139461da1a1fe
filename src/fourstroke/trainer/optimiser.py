"""AdamW over fp32 parameters, with a clip by global norm and a linear warm-up."""

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
        config: Read for the rate, its warm-up, Adam's settings and the clip.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, config: TrainerConfig) -> None:
        """Start with empty moments."""
        self._parameters = list(parameters)
        self._config = config
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

        Update k (counted from 1) of a warm-up over w uses ``learning_rate * k / w``.

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
        warm = min(1.0, self._num_updates / max(1, self._config.warmup_steps))
        learning_rate = self._config.learning_rate * warm
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=False)
        return grad_norm, learning_rate
