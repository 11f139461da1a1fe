"""Losses: functions ``(inputs, config) -> LossOutput`` over the loss tokens of a micro-batch. No classes, no state.

A term's loss is the sum of ``weight * token loss``; the weights hold the denominator of the whole optimiser step.
Two tables hold every term: those that a bundle can use, and those that wait for a role which makes their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from fourstroke.algorithms.corrections import importance_weights
from fourstroke.algorithms.inputs import LossInputs, LossOutput, check_finite
from fourstroke.algorithms.penalties import entropy_bonus, reference_kl
from fourstroke.algorithms.policy_losses import (
    POLICY_LOSSES,
    covariance_clip,
    covariance_penalty,
    second_moment_mask,
    sequence_clip_by_token,
)
from fourstroke.algorithms.supervised_losses import (
    identity_preference,
    imitation,
    preference,
    reward_comparison,
    value_error,
    weighted_distillation,
)
from fourstroke.algorithms.terms import LossMetric, terms_of
from fourstroke.config import AlgorithmConfig

Loss = Callable[[LossInputs, AlgorithmConfig], LossOutput]


def policy_loss(
    inputs: LossInputs,
    config: AlgorithmConfig,
    *,
    token_losses: Callable[[LossInputs, AlgorithmConfig], tuple[Tensor, Tensor]],
) -> LossOutput:
    """A policy-gradient loss, each token scaled by its truncated importance weight.

    Args:
        inputs: The loss tokens; already checked to be finite.
        config: Read for the correction, and by ``token_losses``.
        token_losses: A function of :mod:`fourstroke.algorithms.policy_losses`.

    Returns:
        The loss and all sums of :class:`LossMetric`.

    Example:
        >>> import torch
        >>> one = torch.tensor([1.0])
        >>> inputs = LossInputs(logprobs_N=-one, entropy_N=one, behaviour_logprobs_N=-one, proximal_logprobs_N=-one,
        ...                     advantages_N=2 * one, weight_N=0.25 * one, sequence_N=torch.tensor([0]),
        ...                     row_ids=("r0",))
        >>> LOSSES["policy_clip"](inputs, AlgorithmConfig.model_validate({"name": "grpo"})).loss_sum
        tensor(-0.5000)
    """
    losses_N, is_held_N = token_losses(inputs, config)
    importance_N, is_truncated_N = importance_weights(inputs, config)
    loss_sum = (inputs.weight_N * importance_N * losses_N).sum()
    mismatch_N = inputs.logprobs_N.detach() - inputs.behaviour_logprobs_N
    return LossOutput(
        loss_sum=loss_sum,
        sums={
            LossMetric.LOSS: loss_sum.detach(),
            LossMetric.ENTROPY: inputs.entropy_N.detach().sum(),
            LossMetric.LOG_RATIO: mismatch_N.sum(),
            LossMetric.ABS_LOG_RATIO: mismatch_N.abs().sum(),
            LossMetric.CLIPPED: is_held_N.sum(),
            LossMetric.IMPORTANCE_WEIGHT: importance_N.sum(),
            LossMetric.TRUNCATED: is_truncated_N.sum(),
        },
    )


def _alone(loss_of: Callable[[LossInputs, AlgorithmConfig], Tensor]) -> Loss:
    """A term that has a loss and no metric of its own."""

    def loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
        loss_sum = loss_of(inputs, config)
        return LossOutput(loss_sum=loss_sum, sums={LossMetric.LOSS: loss_sum.detach()})

    return loss


LOSSES: dict[str, Loss] = {
    **{name: partial(policy_loss, token_losses=token_losses) for name, token_losses in POLICY_LOSSES.items()},
    "entropy_bonus": _alone(entropy_bonus),
}

# Terms whose inputs no role makes yet, with the settings of their papers: what is missing, and the term.
WAITING_LOSSES: dict[str, tuple[str, Loss]] = {
    "sequence_clip_by_token": (
        "advantages by token",
        partial(policy_loss, token_losses=sequence_clip_by_token),
    ),
    "covariance_clip": (
        "selection over the step",
        partial(policy_loss, token_losses=covariance_clip),
    ),
    "covariance_penalty": (
        "selection over the step",
        partial(policy_loss, token_losses=lambda inputs, _: covariance_penalty(inputs, coefficient=1.0)),
    ),
    "second_moment_mask": (
        "selection over the step",
        partial(policy_loss, token_losses=lambda inputs, _: second_moment_mask(inputs)),
    ),
    "reference_kl": ("reference", _alone(partial(reference_kl, coefficient=0.001, estimator="k3"))),
    "distillation": ("teacher", _alone(weighted_distillation)),
    "value_error": ("critic", _alone(lambda inputs, _: value_error(inputs, clip=0.2))),
    "imitation": ("offline rows", _alone(lambda inputs, _: imitation(inputs))),
    "preference": ("reference, pairs", _alone(lambda inputs, _: preference(inputs, beta=0.1, label_noise=0.0))),
    "identity_preference": ("reference, pairs", _alone(lambda inputs, _: identity_preference(inputs, beta=0.1))),
    "reward_comparison": ("reward head, pairs", _alone(lambda inputs, _: reward_comparison(inputs))),
}


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
