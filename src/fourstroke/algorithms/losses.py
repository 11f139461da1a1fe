"""Losses: functions ``(inputs, config) -> LossOutput`` over the loss tokens of a micro-batch. No classes, no state.

A term's loss is the sum of ``weight * token loss``; the weights hold the denominator of the whole optimiser step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fourstroke.algorithms.corrections import importance_weights
from fourstroke.algorithms.inputs import LossInputs, LossOutput, check_finite
from fourstroke.algorithms.terms import LossMetric, terms_of
from fourstroke.config import AlgorithmConfig

# exp(20) is 5e8: far beyond every clip, and far below where a product with an advantage overflows in fp32. Without the
# bound, a ratio that a clip holds would still send 0 * inf = nan into the gradient.
MAX_LOG_RATIO = 20.0


def clipped_token_losses(
    log_ratio_N: Tensor, advantages_N: Tensor, *, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss of each token, with separate bounds and an optional bound for negative advantages.

    ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, and where ``A < 0`` and ``dual_clip`` is set no more than
    ``dual_clip * |A|``. Sources: Schulman et al. 2017, arXiv:1707.06347, eq. 7; separate bounds, DAPO, Yu et al. 2025,
    arXiv:2503.14476, eq. 10; dual clip, Ye et al. 2020, arXiv:1912.09729, eq. 2.

    Args:
        log_ratio_N: ``current - proximal`` log-probability; bounded here to +-:data:`MAX_LOG_RATIO`.
        advantages_N: Advantage of the token.
        config: Read for ``clip_low``, ``clip_high`` and ``dual_clip``.

    Returns:
        The losses [N] and a bool [N], true where a clip holds the loss, so that the token gets no gradient.

    Example:
        >>> config = AlgorithmConfig.model_validate({"name": "grpo", "clip_high": 0.2, "dual_clip": 3.0})
        >>> losses, is_clipped = clipped_token_losses(torch.tensor([4.0]).log(), torch.tensor([-1.5]), config=config)
        >>> losses.tolist(), is_clipped.tolist()
        ([4.5], [True])
    """
    ratio_N = torch.exp(log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    losses_N = torch.maximum(plain_N, clipped_N)
    is_clipped_N = clipped_N > plain_N
    if config.dual_clip is not None:
        bound_N = -advantages_N * config.dual_clip
        is_bounded_N = (advantages_N < 0) & (losses_N > bound_N)
        losses_N = torch.where(is_bounded_N, bound_N, losses_N)
        is_clipped_N = is_clipped_N | is_bounded_N
    return losses_N, is_clipped_N


def policy_clip_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """The clipped policy-gradient loss, each token scaled by its truncated importance weight.

    Args:
        inputs: The loss tokens; already checked to be finite.
        config: Read for the clips and for ``correction`` and ``correction_cap``.

    Returns:
        The loss and all sums of :class:`LossMetric`.

    Example:
        >>> one = torch.tensor([1.0])
        >>> inputs = LossInputs(logprobs_N=-one, entropy_N=one, behaviour_logprobs_N=-one, proximal_logprobs_N=-one,
        ...                     advantages_N=2 * one, weight_N=0.25 * one, sequence_N=torch.tensor([0]),
        ...                     row_ids=("r0",))
        >>> policy_clip_loss(inputs, AlgorithmConfig.model_validate({"name": "grpo"})).loss_sum
        tensor(-0.5000)
    """
    losses_N, is_clipped_N = clipped_token_losses(
        inputs.logprobs_N - inputs.proximal_logprobs_N, inputs.advantages_N, config=config
    )
    importance_N, is_truncated_N = importance_weights(inputs, kind=config.correction, cap=config.correction_cap)
    loss_sum = (inputs.weight_N * importance_N * losses_N).sum()
    mismatch_N = inputs.logprobs_N.detach() - inputs.behaviour_logprobs_N
    return LossOutput(
        loss_sum=loss_sum,
        sums={
            LossMetric.LOSS: loss_sum.detach(),
            LossMetric.ENTROPY: inputs.entropy_N.sum(),
            LossMetric.LOG_RATIO: mismatch_N.sum(),
            LossMetric.ABS_LOG_RATIO: mismatch_N.abs().sum(),
            LossMetric.CLIPPED: is_clipped_N.sum(),
            LossMetric.IMPORTANCE_WEIGHT: importance_N.sum(),
            LossMetric.TRUNCATED: is_truncated_N.sum(),
        },
    )


LOSSES: dict[str, Callable[[LossInputs, AlgorithmConfig], LossOutput]] = {"policy_clip": policy_clip_loss}


def bind_loss(config: AlgorithmConfig) -> Callable[[LossInputs], LossOutput]:
    """The loss that a configuration describes, as a function of the loss tokens alone.

    The function raises ``DataError`` where a loss token carries an infinity or no number, and names the row.

    Raises:
        ConfigError: ``algorithm.name`` names no bundle.

    Example:
        >>> loss = bind_loss(AlgorithmConfig.model_validate({"name": "dr_grpo"}))
    """
    term_losses = [LOSSES[term.name] for term in terms_of(config)]

    def loss(inputs: LossInputs) -> LossOutput:
        check_finite(inputs)
        outputs = [term_loss(inputs, config) for term_loss in term_losses]
        loss_sum = sum((output.loss_sum for output in outputs), start=inputs.logprobs_N.new_zeros(()))
        sums = {metric: value for output in outputs for metric, value in output.sums.items()}
        return LossOutput(loss_sum=loss_sum, sums={**sums, LossMetric.LOSS: loss_sum.detach()})

    return loss
