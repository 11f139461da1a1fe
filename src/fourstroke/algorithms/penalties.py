"""Addends beside a policy loss: the entropy bonus and the divergence from a reference policy."""

from __future__ import annotations

import torch
from torch import Tensor

from fourstroke.algorithms.corrections import importance_weights
from fourstroke.algorithms.inputs import LossInputs
from fourstroke.algorithms.policy_losses import MAX_LOG_RATIO
from fourstroke.config import AlgorithmConfig


def entropy_bonus(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """``-entropy_coefficient`` times the weighted sum of entropies: a positive coefficient keeps the policy open.

    Source: Williams and Peng 1991; PPO, arXiv:1707.06347, eq. 9.

    Example:
        >>> one = torch.tensor([1.0])
        >>> inputs = LossInputs(logprobs_N=-one, entropy_N=2 * one, behaviour_logprobs_N=-one,
        ...                     proximal_logprobs_N=-one, advantages_N=one, weight_N=0.5 * one,
        ...                     sequence_N=torch.tensor([0]), row_ids=("r0",))
        >>> entropy_bonus(inputs, AlgorithmConfig.model_validate({"name": "grpo", "entropy_coefficient": 0.25}))
        tensor(-0.2500)
    """
    return -config.entropy_coefficient * (inputs.weight_N * inputs.entropy_N).sum()


def kl_estimates(logprobs_N: Tensor, reference_logprobs_N: Tensor, *, estimator: str) -> Tensor:
    """Estimates of KL(current || reference) from tokens of the current policy, each with the gradient of the KL.

    With ``d = current - reference``: ``k1 = d``, ``k2 = d^2 / 2``, ``k3 = exp(-d) - 1 + d``. The value is that of the
    estimator; the gradient is always ``d * grad(current)``, whose expectation over tokens of the policy is that of the
    divergence. An estimator's own derivative is something else: that of k1 is zero in expectation, that of k3 is the
    gradient of KL(reference || current).
    Source: Schulman 2020, "Approximating KL Divergence"; Tang and Munos 2025, arXiv:2506.09477 (gradients).

    Args:
        logprobs_N: Current log-probabilities, with gradient.
        reference_logprobs_N: Those of the reference, same shape.
        estimator: ``k1``, ``k2`` or ``k3``.

    Example:
        >>> kl_estimates(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator="k2")
        tensor([0.1250])
    """
    distance_N = logprobs_N - reference_logprobs_N
    square_N = distance_N**2 / 2
    fixed_N = distance_N.detach()
    values_N = {
        "k1": fixed_N,
        "k2": square_N.detach(),
        "k3": torch.expm1(-fixed_N.clamp(min=-MAX_LOG_RATIO)) + fixed_N,
    }[estimator]
    return values_N + (square_N - square_N.detach())


def reference_kl(inputs: LossInputs, config: AlgorithmConfig, *, coefficient: float, estimator: str) -> Tensor:
    """``coefficient`` times the weighted sum of :func:`kl_estimates`, with the correction of the policy loss.

    Source: GRPO, Shao et al. 2024, arXiv:2402.03300, eqs. 3 and 4 (there with k3's own derivative).
    """
    assert inputs.reference_logprobs_N is not None, "reference_kl needs log-probabilities of the reference"
    importance_N, _ = importance_weights(inputs, config)
    estimates_N = kl_estimates(inputs.logprobs_N, inputs.reference_logprobs_N, estimator=estimator)
    return coefficient * (inputs.weight_N * importance_N * estimates_N).sum()
