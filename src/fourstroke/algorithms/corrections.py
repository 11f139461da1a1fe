"""Corrections for tokens that were sampled by other weights, or by another engine's rounding, than the proximal policy.

The weight is ``min(exp(proximal - behaviour), cap)``, a constant: it never carries a gradient, and it never uses the
current log-probability, or the policy's change within the step would be counted twice (it is in the clipped ratio).
Source: truncated importance sampling, Ionides 2008; for rollout engines Yao et al. 2025, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training"; the separate proximal policy is of Hilton et al. 2022, arXiv:2110.00641.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fourstroke.algorithms.inputs import LossInputs


def no_log_weights(inputs: LossInputs) -> Tensor:
    """Zeros: every weight is 1."""
    return torch.zeros_like(inputs.proximal_logprobs_N)


def token_log_weights(inputs: LossInputs) -> Tensor:
    """``proximal - behaviour`` of the token itself."""
    return inputs.proximal_logprobs_N - inputs.behaviour_logprobs_N


def sequence_log_weights(inputs: LossInputs) -> Tensor:
    """The sum of ``proximal - behaviour`` over all loss tokens of the token's row.

    The sum and not the mean: ``exp`` of it is the importance weight of the whole reply, the product over its tokens
    (Liu, Li et al. 2025, "When Speed Kills Stability"; the mean would be GSPO's length-normalised ratio).
    """
    log_weights_N = token_log_weights(inputs)
    sums_B = log_weights_N.new_zeros(len(inputs.row_ids)).index_add_(0, inputs.sequence_N, log_weights_N)
    return sums_B[inputs.sequence_N]


CORRECTIONS: dict[str, Callable[[LossInputs], Tensor]] = {
    "none": no_log_weights,
    "token": token_log_weights,
    "sequence": sequence_log_weights,
}


def importance_weights(inputs: LossInputs, *, kind: str, cap: float) -> tuple[Tensor, Tensor]:
    """The truncated importance weight of each token, without gradient.

    Args:
        inputs: The loss tokens.
        kind: A key of :data:`CORRECTIONS`.
        cap: The largest weight, ``algorithm.correction_cap``.

    Returns:
        The weights [N] and a bool [N], true where the cap holds the weight.

    Example:
        >>> one = torch.tensor([0.5])
        >>> inputs = LossInputs(logprobs_N=-one, entropy_N=one, behaviour_logprobs_N=-3 * one,
        ...                     proximal_logprobs_N=-one, advantages_N=one, weight_N=one,
        ...                     sequence_N=torch.tensor([0]), row_ids=("r0",))
        >>> importance_weights(inputs, kind="token", cap=2.0)
        (tensor([2.]), tensor([True]))
    """
    with torch.no_grad():
        weights_N = torch.exp(CORRECTIONS[kind](inputs))
        return weights_N.clamp(max=cap), weights_N > cap
