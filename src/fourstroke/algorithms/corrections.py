"""Corrections for tokens that were sampled by other weights, or by another engine's rounding, than the proximal policy.

Three policies are kept apart: the behaviour policy sampled the token, the proximal one holds the trust region, the
current one is trained. What stands between the first two is corrected here:

    log weight   proximal - behaviour, of the token, the row's sum or the row's mean
    correction   min(exp(log weight), cap)                          truncated importance sampling (TIS)
    rejection    0 where exp(log weight) leaves [low, high], else 1 masked importance sampling (MIS), IcePop's band

Both are constants: they never carry a gradient, and never use the current log-probability, or the policy's change
within the step would be counted twice (it is in the clipped ratio). Rejected tokens stay in the step's denominators,
which are counted before anybody knows the proximal policy.
Sources: Ionides 2008; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; Liu,
Li et al. 2025, "When Speed Kills Stability" (sequences, masks); IcePop, Ling Team 2025, arXiv:2510.18855; the separate
proximal policy is of Hilton et al. 2022, arXiv:2110.00641.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fourstroke.algorithms.inputs import LossInputs
from fourstroke.config import AlgorithmConfig


def no_log_weights(inputs: LossInputs) -> Tensor:
    """Zeros: every weight is 1."""
    return torch.zeros_like(inputs.proximal_logprobs_N)


def token_log_weights(inputs: LossInputs) -> Tensor:
    """``proximal - behaviour`` of the token itself."""
    return inputs.proximal_logprobs_N - inputs.behaviour_logprobs_N


def sequence_log_weights(inputs: LossInputs) -> Tensor:
    """The sum of ``proximal - behaviour`` over all loss tokens of the token's row.

    ``exp`` of it is the importance weight of the whole reply, the product over its tokens: unbiased, and of a variance
    that grows with the length.
    """
    return inputs.row_sums(token_log_weights(inputs))[inputs.sequence_N]


def geometric_log_weights(inputs: LossInputs) -> Tensor:
    """The mean of ``proximal - behaviour`` over all loss tokens of the token's row.

    ``exp`` of it is the geometric mean of the tokens' weights, whose size does not depend on the length.
    """
    return inputs.row_means(token_log_weights(inputs))[inputs.sequence_N]


CORRECTIONS: dict[str, Callable[[LossInputs], Tensor]] = {
    "none": no_log_weights,
    "token": token_log_weights,
    "sequence": sequence_log_weights,
    "geometric": geometric_log_weights,
}


def importance_weights(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The truncated importance weight of each token, 0 where it is rejected, without gradient.

    Args:
        inputs: The loss tokens.
        config: Read for ``correction``, ``correction_cap``, ``rejection``, ``rejection_low`` and ``rejection_high``.

    Returns:
        The weights [N] and a bool [N], true where the cap holds the weight or the token is rejected.

    Example:
        >>> one = torch.tensor([0.5])
        >>> inputs = LossInputs(logprobs_N=-one, entropy_N=one, behaviour_logprobs_N=-3 * one,
        ...                     proximal_logprobs_N=-one, advantages_N=one, weight_N=one,
        ...                     sequence_N=torch.tensor([0]), row_ids=("r0",))
        >>> importance_weights(inputs, AlgorithmConfig.model_validate({"name": "grpo"}))
        (tensor([2.]), tensor([True]))
    """
    with torch.no_grad():
        weights_N = torch.exp(CORRECTIONS[config.correction](inputs))
        is_truncated_N = weights_N > config.correction_cap
        weights_N = weights_N.clamp(max=config.correction_cap)
        if config.rejection != "none":
            ratio_N = torch.exp(CORRECTIONS[config.rejection](inputs))
            is_rejected_N = ratio_N < config.rejection_low
            if config.rejection_high is not None:
                is_rejected_N = is_rejected_N | (ratio_N > config.rejection_high)
            weights_N = torch.where(is_rejected_N, 0.0, weights_N)
            is_truncated_N = is_truncated_N | is_rejected_N
        return weights_N, is_truncated_N


def interpolated_proximal(current_N: Tensor, behaviour_N: Tensor, lag_N: Tensor) -> Tensor:
    """A proximal log-probability without a pass of the model: between behaviour and current, by the token's age.

    ``behaviour / d + (1 - 1 / d) * current`` for a token that is d >= 1 versions old, and the current one for d = 0:
    the line through both, where the weights stood one version ago. Source: A-3PO, Li et al. 2025, arXiv:2512.06547.

    Args:
        current_N: Current log-probabilities.
        behaviour_N: Those at sampling.
        lag_N: Versions between the weights that sampled the token and the current ones, at least 0.

    Returns:
        [N] without gradient.

    Example:
        >>> interpolated_proximal(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([4]))
        tensor([-1.2500])
    """
    share_N = torch.where(lag_N > 0, 1.0 / lag_N.clamp(min=1), 0.0).to(current_N.dtype)
    return torch.lerp(current_N.detach(), behaviour_N, share_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMoments:
    """Plain sums over tokens or rows, which add up over micro-batches, ranks and buckets of staleness.

    Example:
        >>> moments = WeightMoments.of(torch.tensor([0.0, 0.0]))
        >>> (moments + moments).effective_fraction
        1.0
    """

    count: int
    weight: float
    weight_squared: float
    log_weight: float
    log_weight_squared: float

    @staticmethod
    def of(log_weights: Tensor) -> WeightMoments:
        """Of untruncated importance weights, given by their logarithms."""
        log_weights = log_weights.detach().double()
        weights = torch.exp(log_weights)
        return WeightMoments(
            count=log_weights.numel(),
            weight=float(weights.sum()),
            weight_squared=float((weights**2).sum()),
            log_weight=float(log_weights.sum()),
            log_weight_squared=float((log_weights**2).sum()),
        )

    def __add__(self, other: WeightMoments) -> WeightMoments:
        return WeightMoments(
            count=self.count + other.count,
            weight=self.weight + other.weight,
            weight_squared=self.weight_squared + other.weight_squared,
            log_weight=self.log_weight + other.log_weight,
            log_weight_squared=self.log_weight_squared + other.log_weight_squared,
        )

    @property
    def effective_fraction(self) -> float:
        """Effective sample size over the number of samples, ``(sum w)^2 / (n * sum w^2)``; 1 where there is none.

        Source: Kish 1965. From 1 (all weights equal) down to 1 / n (one sample holds all the weight).
        """
        return self.weight**2 / (self.count * self.weight_squared) if self.weight_squared > 0 else 1.0
