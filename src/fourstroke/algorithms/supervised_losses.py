"""Losses without a sampled reward: imitation, preferences, reward models, distillation and the critic's values.

Each takes the loss tokens of a micro-batch and returns its part of the step's loss. Weights hold the denominators:
``weight_N`` those of tokens, ``pairs.weight_P`` those of pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fourstroke.algorithms.corrections import importance_weights
from fourstroke.algorithms.inputs import LossInputs, Pairs
from fourstroke.algorithms.policy_losses import clipped_token_losses
from fourstroke.config import AlgorithmConfig


def imitation(inputs: LossInputs) -> Tensor:
    """Negative log-likelihood of the loss tokens: supervised fine-tuning."""
    return -(inputs.weight_N * inputs.logprobs_N).sum()


def distillation(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The clipped policy loss of each token, with ``teacher - proximal`` for an advantage.

    That is the negative of a one-token estimate of KL(policy || teacher), of tokens that the policy itself sampled.
    With several teachers each row brings the numbers of its own.
    Sources: Agarwal et al. 2023, arXiv:2306.13649; Lu et al. 2025, "On-Policy Distillation" (Thinking Machines).

    Returns:
        The losses [N] and a bool [N], true where a clip holds the loss.
    """
    assert inputs.teacher_logprobs_N is not None, "distillation needs log-probabilities of the teacher"
    return clipped_token_losses(
        inputs.logprobs_N - inputs.proximal_logprobs_N,
        inputs.teacher_logprobs_N - inputs.proximal_logprobs_N,
        config=config,
    )


def weighted_distillation(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """The weighted sum of :func:`distillation`, with the correction of the policy loss."""
    importance_N, _ = importance_weights(inputs, config)
    return (inputs.weight_N * importance_N * distillation(inputs, config)[0]).sum()


def value_error(inputs: LossInputs, *, clip: float | None) -> Tensor:
    """Half the squared error of the critic's values; with ``clip``, the larger of it and that of the clipped values.

    Values are clipped to ``clip`` around those at the start of the step.
    Source: Schulman et al. 2017, arXiv:1707.06347, and its published code; Engstrom et al. 2020, arXiv:2005.12729.
    """
    assert inputs.values_N is not None, "value_error needs values"
    assert inputs.returns_N is not None, "value_error needs returns"
    squares_N = (inputs.values_N - inputs.returns_N) ** 2
    if clip is not None:
        assert inputs.old_values_N is not None, "value_error with a clip needs the old values"
        moved_N = (inputs.values_N - inputs.old_values_N).clamp(-clip, clip)
        squares_N = torch.maximum(squares_N, (inputs.old_values_N + moved_N - inputs.returns_N) ** 2)
    return (inputs.weight_N * squares_N).sum() / 2


def _margins(inputs: LossInputs) -> tuple[Tensor, Pairs]:
    """``log(pi / ref)`` of the chosen reply less that of the rejected one, [P]."""
    assert inputs.reference_logprobs_N is not None, "a preference loss needs log-probabilities of the reference"
    assert inputs.pairs is not None, "a preference loss needs pairs"
    log_ratio_B = inputs.row_sums(inputs.logprobs_N - inputs.reference_logprobs_N)
    return log_ratio_B[inputs.pairs.chosen_P] - log_ratio_B[inputs.pairs.rejected_P], inputs.pairs


def preference(inputs: LossInputs, *, beta: float, label_noise: float) -> Tensor:
    """``-(1 - e) log sigmoid(beta * margin) - e log sigmoid(-beta * margin)`` of each pair.

    Sources: DPO, Rafailov et al. 2023, arXiv:2305.18290, eq. 7; noise e of the labels, Mitchell 2023, "A note on DPO
    with noisy preferences".
    """
    margins_P, pairs = _margins(inputs)
    losses_P = -(1 - label_noise) * logsigmoid(beta * margins_P) - label_noise * logsigmoid(-beta * margins_P)
    return (pairs.weight_P * losses_P).sum()


def identity_preference(inputs: LossInputs, *, beta: float) -> Tensor:
    """``(margin - 1 / (2 beta))^2`` of each pair. Source: IPO, Azar et al. 2023, arXiv:2310.12036, eq. 17."""
    margins_P, pairs = _margins(inputs)
    return (pairs.weight_P * (margins_P - 1 / (2 * beta)) ** 2).sum()


def reward_comparison(inputs: LossInputs) -> Tensor:
    """``-log sigmoid(score of the chosen - score of the rejected)``: a reward model. Source: Bradley and Terry 1952."""
    assert inputs.row_scores_B is not None, "reward_comparison needs scores of rows"
    assert inputs.pairs is not None, "reward_comparison needs pairs"
    margins_P = inputs.row_scores_B[inputs.pairs.chosen_P] - inputs.row_scores_B[inputs.pairs.rejected_P]
    return -(inputs.pairs.weight_P * logsigmoid(margins_P)).sum()
