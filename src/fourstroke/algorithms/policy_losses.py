"""Policy-gradient losses: functions ``(inputs, config) -> (losses_N, is_held_N)`` of each loss token.

``is_held_N`` is true where a clip, a mask or a band keeps the token from any gradient. Importance weights and the
token's share of the step are multiplied in by :mod:`fourstroke.algorithms.losses`, the same for all.
In formulas r is ``exp(current - proximal)``, A the advantage, and ``sg`` stops the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fourstroke.algorithms.inputs import LossInputs
from fourstroke.config import AlgorithmConfig

# exp(20) is 5e8: far beyond every clip, and far below where a product with an advantage overflows in fp32. Without the
# bound, a ratio that a clip holds would still send 0 * inf = nan into the gradient.
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio_N: Tensor) -> Tensor:
    """``exp`` of a log-ratio bounded to +-:data:`MAX_LOG_RATIO`."""
    return torch.exp(log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


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
    ratio_N = bounded_exp(log_ratio_N)
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


def _log_ratio(inputs: LossInputs) -> Tensor:
    return inputs.logprobs_N - inputs.proximal_logprobs_N


def token_clip(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """:func:`clipped_token_losses` of each token's own ratio."""
    return clipped_token_losses(_log_ratio(inputs), inputs.advantages_N, config=config)


def sequence_clip(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The clipped loss of the row's ratio, the geometric mean ``s = exp(mean(current - proximal))`` of its tokens'.

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071. Weigh with ``sequence_mean`` to get eq. 5.
    """
    log_ratio_N = inputs.row_means(_log_ratio(inputs))[inputs.sequence_N]
    return clipped_token_losses(log_ratio_N, inputs.advantages_N, config=config)


def sequence_clip_by_token(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The same with ``sg(s) * pi / sg(pi)`` for a ratio, so that each token is moved by its own advantage.

    With one advantage in a row, value and gradient are those of :func:`sequence_clip`.
    Source: GSPO-token, arXiv:2507.18071.
    """
    log_ratio_N = inputs.row_means(_log_ratio(inputs).detach())[inputs.sequence_N]
    own_N = inputs.logprobs_N - inputs.logprobs_N.detach()
    return clipped_token_losses(log_ratio_N + own_N, inputs.advantages_N, config=config)


def geometric_clip(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """``-A`` times the geometric mean of the row's ratios, each clipped on the side that its advantage pushes to.

    Log-ratios are clipped to ``log(1 - clip_low)`` and ``log(1 + clip_high)``. Source: GMPO, Zhao et al. 2025,
    arXiv:2507.20673, whose range (e^-0.4, e^0.4) is ``clip_low`` 0.33 and ``clip_high`` 0.49.
    """
    log_ratio_N = _log_ratio(inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    bounds = torch.log(log_ratio_N.new_tensor([1 - config.clip_low, 1 + config.clip_high]))
    clipped_N = log_ratio_N.clamp(bounds[0], bounds[1])
    sign_N = inputs.advantages_N.sign()
    held_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * clipped_N)
    ratio_N = torch.exp(inputs.row_means(held_N))[inputs.sequence_N]
    return -inputs.advantages_N * ratio_N, sign_N * log_ratio_N > sign_N * clipped_N


def clipped_importance(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """``-sg(clip(r)) A log pi``: the ratio is clipped as a weight, so that every token keeps a gradient.

    Source: CISPO, MiniMax 2025, arXiv:2506.13585. ``clip_low = 1`` leaves it unbounded below.
    """
    ratio_N = bounded_exp(_log_ratio(inputs).detach()).clamp(1 - config.clip_low, 1 + config.clip_high)
    losses_N = -ratio_N * inputs.advantages_N * inputs.logprobs_N
    return losses_N, torch.zeros_like(losses_N, dtype=torch.bool)


def soft_gate(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """``-A (4 / tau) sigmoid(tau (r - 1))``: a smooth gate instead of a clip, steeper for negative advantages.

    Source: SAPO, Gao et al. 2025, arXiv:2511.20347; tau is ``gate_positive`` or ``gate_negative``.
    """
    tau_N = torch.where(inputs.advantages_N > 0, config.gate_positive, config.gate_negative).to(inputs.logprobs_N)
    ratio_N = bounded_exp(_log_ratio(inputs))
    losses_N = -inputs.advantages_N * torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N
    return losses_N, torch.zeros_like(losses_N, dtype=torch.bool)


def binary_divergence(current_N: Tensor, behaviour_N: Tensor, *, kind: str) -> Tensor:
    """Divergence of the two distributions "this token, or any other", which bounds that of the whole ones from below.

    ``tv``: ``|p - q|``. ``kl``: ``q log(q / p) + (1 - q) log((1 - q) / (1 - p))`` with p current and q behaviour.
    Source: DPPO, Qi et al. 2026, arXiv:2602.04879.

    Example:
        >>> half, quarter = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
        >>> binary_divergence(half, quarter, kind="tv").tolist()
        [0.25]
    """
    p_N, q_N = torch.exp(current_N), torch.exp(behaviour_N)
    if kind == "tv":
        return (p_N - q_N).abs()
    tiny = torch.finfo(p_N.dtype).tiny
    rest_p_N, rest_q_N = ((-torch.expm1(logprobs_N)).clamp(min=tiny) for logprobs_N in (current_N, behaviour_N))
    return q_N * (behaviour_N - current_N) + rest_q_N * (rest_q_N / rest_p_N).log()


def divergence_mask(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """``-sg(min(rho, correction_cap)) A log pi``, 0 where the token has left the trust region and would go further.

    rho is ``exp(current - behaviour)``: the region is around the policy that sampled, so that no other correction may
    stand beside it. A token is held if its divergence from behaviour exceeds ``divergence_limit`` and rho is already on
    the side that A pushes to. Source: DPPO, Qi et al. 2026, arXiv:2602.04879.
    """
    with torch.no_grad():
        log_ratio_N = inputs.logprobs_N - inputs.behaviour_logprobs_N
        distance_N = binary_divergence(inputs.logprobs_N, inputs.behaviour_logprobs_N, kind=config.divergence)
        is_held_N = (distance_N > config.divergence_limit) & (inputs.advantages_N * log_ratio_N > 0)
        ratio_N = bounded_exp(log_ratio_N).clamp(max=config.correction_cap)
    return torch.where(is_held_N, 0.0, -ratio_N * inputs.advantages_N * inputs.logprobs_N), is_held_N


def quadratic(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """``-A log pi + (quadratic_strength / 2) (current - behaviour)^2``: no ratio; a square holds the policy near.

    Source: DRO, Richemond et al. 2024, arXiv:2405.19107, there for whole replies, here for each token.
    """
    distance_N = inputs.logprobs_N - inputs.behaviour_logprobs_N
    losses_N = -inputs.advantages_N * inputs.logprobs_N + config.quadratic_strength / 2 * distance_N**2
    return losses_N, torch.zeros_like(losses_N, dtype=torch.bool)


def covariance_clip(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The clipped loss, 0 at the few selected tokens whose update would cost most entropy.

    Source: Clip-Cov, Cui et al. 2025, arXiv:2505.22617. ``selection.in_covariance_band`` selects.
    """
    assert inputs.is_selected_N is not None, "covariance_clip needs the selection of the step"
    losses_N, is_clipped_N = token_clip(inputs, config)
    return torch.where(inputs.is_selected_N, 0.0, losses_N), is_clipped_N | inputs.is_selected_N


def covariance_penalty(inputs: LossInputs, *, coefficient: float) -> tuple[Tensor, Tensor]:
    """``-A r``, and at the selected tokens ``coefficient * KL(proximal || current)`` beside it.

    The divergence is estimated by ``r - 1 - log r``, which is never negative and right in value and gradient for tokens
    of the proximal policy; the authors' code takes ``|log r|``, whose gradient jumps where the policies agree.
    Source: KL-Cov, Cui et al. 2025, arXiv:2505.22617. ``selection.largest_covariance`` selects.
    """
    assert inputs.is_selected_N is not None, "covariance_penalty needs the selection of the step"
    log_ratio_N = _log_ratio(inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = torch.exp(log_ratio_N)
    penalty_N = torch.where(inputs.is_selected_N, coefficient * (ratio_N - 1 - log_ratio_N), 0.0)
    return -inputs.advantages_N * ratio_N + penalty_N, torch.zeros_like(inputs.is_selected_N)


def second_moment_mask(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """``-A exp(current - behaviour)`` at the tokens that are not selected.

    Source: M2PO, Zheng et al. 2025, arXiv:2510.01161. ``selection.beyond_second_moment`` selects the few tokens
    that make the step's mean squared log-ratio too large.
    """
    assert inputs.is_selected_N is not None, "second_moment_mask needs the selection of the step"
    ratio_N = bounded_exp(inputs.logprobs_N - inputs.behaviour_logprobs_N)
    return torch.where(inputs.is_selected_N, 0.0, -inputs.advantages_N * ratio_N), inputs.is_selected_N


POLICY_LOSSES: dict[str, Callable[[LossInputs, AlgorithmConfig], tuple[Tensor, Tensor]]] = {
    "policy_clip": token_clip,
    "sequence_clip": sequence_clip,
    "geometric_clip": geometric_clip,
    "clipped_importance": clipped_importance,
    "soft_gate": soft_gate,
    "divergence_mask": divergence_mask,
    "quadratic": quadratic,
}
