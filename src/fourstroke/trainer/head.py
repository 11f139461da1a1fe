"""Log-probability and entropy of given tokens from hidden states, without ever holding all logits.

Tokens go through the output matrix in chunks, and the backward pass computes each chunk's logits again: for a
vocabulary of 49,152 a thousand tokens of fp32 logits are 200 MB, several times over with their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Each chunk passes once over the whole gradient of the output matrix, and its logits are 100 MB for 49,152 words.
CHUNK_TOKENS = 512
# Elements that are converted at once: 1 MB of fp32.
_PIECE = 2**18


def _scaled_logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    logits_CV = hidden_CH @ weight_VH.T
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps each token's largest logit m, sum s of ``exp(logit - m)`` and entropy H. With p = exp(logit - m) /
    s the gradients of the logits are ``grad * (one_hot - p) / T`` and ``-grad_H * p (log p + H) / T``. The second is
    computed only where something asks for it.

    The two are kept apart: m + log(s) rounds at the size of m, and all of a token's probabilities would err together.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N, entropy_N, largest_N, sum_N = hidden_NH.new_empty((4, len(hidden_NH)), dtype=dtype).unbind()
        for part in _chunks(len(hidden_NH), chunk):
            logits_CV = _scaled_logits(hidden_NH[part], weight_VH, temperature)
            largest_N[part] = logits_CV.amax(-1)
            logits_CV.sub_(largest_N[part, None])
            target_C = logits_CV.gather(-1, targets_N[part, None])[:, 0]
            weights_CV = logits_CV.exp()
            sum_N[part] = weights_CV.sum(-1)
            logprobs_N[part] = target_C - sum_N[part].log()
            entropy_N[part] = sum_N[part].log() - weights_CV.mul_(logits_CV).sum(-1) / sum_N[part]
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, largest_N, sum_N, entropy_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_NH, weight_VH, targets_N, largest_N, sum_N, entropy_N = ctx.saved_tensors
        grad_N = torch.zeros_like(sum_N) if grad_N is None else grad_N
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH: Tensor | None = None
        for part in _chunks(len(hidden_NH), ctx.chunk):
            logits_CV = _scaled_logits(hidden_NH[part], weight_VH, ctx.temperature)
            logits_CV.sub_(largest_N[part, None])
            scale_C1 = (grad_N[part] / ctx.temperature)[:, None]
            if grad_entropy_N is None:
                grad_logits_CV = logits_CV.exp_().mul_(-scale_C1 / sum_N[part, None])
            else:
                scale_entropy_C1 = (grad_entropy_N[part] / ctx.temperature)[:, None]
                probabilities_CV = logits_CV.exp().div_(sum_N[part, None])
                logits_CV.add_((entropy_N[part] - sum_N[part].log())[:, None]).mul_(scale_entropy_C1).add_(scale_C1)
                grad_logits_CV = logits_CV.mul_(probabilities_CV).neg_()
            grad_logits_CV.scatter_add_(-1, targets_N[part, None], scale_C1)
            grad_logits_CV = grad_logits_CV.to(hidden_NH.dtype)
            grad_hidden_NH[part] = grad_logits_CV @ weight_VH
            grad_part_VH = grad_logits_CV.T @ hidden_NH[part]
            if grad_weight_VH is None:
                grad_weight_VH = grad_part_VH
            else:
                grad_weight_VH = add_to(grad_weight_VH.to(sum_N.dtype), grad_part_VH)
        grad_weight_VH = torch.zeros_like(weight_VH) if grad_weight_VH is None else grad_weight_VH
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None


def add_to(total: Tensor, part: Tensor) -> Tensor:
    """``total += part`` where the part may be of a narrower type; both contiguous. Returns the total.

    torch converts all of the part before it adds; by pieces that stay in the cache it takes half the time on a CPU.

    Example:
        >>> add_to(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)).tolist()
        [[2.0, 2.0], [2.0, 2.0]]
    """
    if total.dtype == part.dtype or total.is_cuda:
        return total.add_(part)
    scratch = torch.empty(min(total.numel(), _PIECE), dtype=total.dtype)
    for total_part, narrow_part in zip(*(torch.split(each.view(-1), _PIECE) for each in (total, part)), strict=True):
        total_part.add_(scratch[: len(total_part)].copy_(narrow_part))
    return total


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


def token_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, *, temperature: float, chunk: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """``log_softmax(hidden @ weight.T / temperature)`` at the targets, and the entropy of the same distribution.

    The temperature divides the logits before the softmax: no later change of a log-probability amounts to the same.

    Args:
        hidden_NH: Last hidden states at the positions that predict the targets, any floating dtype.
        weight_VH: The output matrix, same dtype.
        targets_N: int64 token ids.
        temperature: Sampling temperature, above 0.
        chunk: Tokens whose logits are held at once.

    Returns:
        Log-probabilities [N] and entropies [N] (nats), both with gradient, float32 or wider.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, -1.0]])
        >>> logprobs, _ = token_logprobs(logits, torch.eye(3), torch.tensor([1]), temperature=0.5)
        >>> round(logprobs.item(), 6)
        -2.129109
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply
    return apply(hidden_NH, weight_VH, targets_N, temperature, chunk)
