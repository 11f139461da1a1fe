"""What a loss is given and what it returns, and the selection of loss tokens that comes before any arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fourstroke.algorithms.terms import LossMetric
from fourstroke.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of rows of one micro-batch, the first of each preferred. A pair is never divided over micro-batches.

    Attributes:
        chosen_P: int64, index of the preferred row.
        rejected_P: int64, index of the other.
        weight_P: Share of the pair in the step's loss, 1 / (pairs of the step) for their mean.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    weight_P: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The N loss tokens of one micro-batch, in row order. Rows are never divided over micro-batches.

    All are floating tensors [N] of one dtype (float32; tests use float64) but ``sequence_N``, which is int64, and what
    is said otherwise. Those that may be None are given where a term of the loss needs them.

    Attributes:
        logprobs_N: ``log_softmax(logits / temperature)`` at the token under the current weights; carries the gradient.
        entropy_N: Entropy of the same distribution; carries a gradient too.
        behaviour_logprobs_N: The same number as the engine that sampled the token reported it.
        proximal_logprobs_N: Under the weights at the start of the step; ``logprobs_N`` without its gradient where they
            were not computed apart, which is right for the first update of a step.
        advantages_N: Advantage of the token.
        weight_N: Share of the token in the step's loss (``aggregation.token_weights``).
        sequence_N: Index of the token's row in ``row_ids``.
        row_ids: Names of the rows, for errors.
        reference_logprobs_N: Under the reference policy.
        teacher_logprobs_N: Under the teacher of the token's row.
        values_N: The critic's value before the token; carries the gradient.
        old_values_N: The same at the start of the step.
        returns_N: What the values are trained on.
        is_selected_N: bool; tokens picked by a statistic of the whole optimiser step (``algorithms.selection``).
        row_scores_B: A reward model's score of each row, with gradient.
        pairs: Rows that are compared.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    behaviour_logprobs_N: Tensor
    proximal_logprobs_N: Tensor
    advantages_N: Tensor
    weight_N: Tensor
    sequence_N: Tensor
    row_ids: tuple[str, ...]
    reference_logprobs_N: Tensor | None = None
    teacher_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    old_values_N: Tensor | None = None
    returns_N: Tensor | None = None
    is_selected_N: Tensor | None = None
    row_scores_B: Tensor | None = None
    pairs: Pairs | None = None

    def __post_init__(self) -> None:
        """All tensors hold one value for each loss token."""
        of_tokens = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_N")}
        shapes = {name: tuple(values.shape) for name, values in of_tokens.items() if values is not None}
        assert set(shapes.values()) == {(len(self.sequence_N),)}, shapes

    def row_sums(self, values_N: Tensor) -> Tensor:
        """Sums over the loss tokens of each row, [B]."""
        return values_N.new_zeros(len(self.row_ids)).index_add(0, self.sequence_N, values_N)

    def row_means(self, values_N: Tensor) -> Tensor:
        """Means over the loss tokens of each row, [B]; 0 for a row without one."""
        num_tokens_B = self.row_sums(torch.ones_like(values_N))
        return self.row_sums(values_N) / num_tokens_B.clamp(min=1)

    def named_values(self) -> Iterator[tuple[str, Tensor]]:
        """The floating tensors of loss tokens with the names used in errors."""
        yield "log-probability", self.logprobs_N
        yield "entropy", self.entropy_N
        yield "behaviour log-probability", self.behaviour_logprobs_N
        yield "proximal log-probability", self.proximal_logprobs_N
        yield "advantage", self.advantages_N
        yield "weight", self.weight_N
        optional = {
            "reference log-probability": self.reference_logprobs_N,
            "teacher log-probability": self.teacher_logprobs_N,
            "value": self.values_N,
            "old value": self.old_values_N,
            "return": self.returns_N,
        }
        yield from ((name, values_N) for name, values_N in optional.items() if values_N is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A micro-batch's part of the step's loss (with gradient) and of the sums in :class:`LossMetric`."""

    loss_sum: Tensor
    sums: dict[LossMetric, Tensor]


def masked(values: Tensor, mask_BT: Tensor) -> Tensor:
    """The values where the mask is true: [B, T, ...] -> [N, ...], in row order.

    Tokens are picked before any arithmetic. Multiplying by a mask lets ``nan * 0`` and ``inf * 0`` through, in the
    value or in the gradient; what is not picked takes no part, and its gradient is an exact zero.

    Args:
        values: [B, T, ...], any dtype.
        mask_BT: bool [B, T].

    Example:
        >>> masked(torch.tensor([[1.0, float("nan")]]), torch.tensor([[True, False]]))
        tensor([1.])
    """
    assert mask_BT.dtype == torch.bool, mask_BT.dtype
    assert values.shape[:2] == mask_BT.shape, (values.shape, mask_BT.shape)
    return values[mask_BT]


def check_finite(inputs: LossInputs) -> None:
    """Refuse a loss token that carries no number.

    Raises:
        DataError: A value of a loss token is infinite or not a number; the text names the row.
    """
    for name, values_N in inputs.named_values():
        is_bad_N = ~torch.isfinite(values_N.detach())
        if bool(is_bad_N.any()):
            position = int(is_bad_N.nonzero()[0, 0])
            row = inputs.row_ids[int(inputs.sequence_N[position])]
            raise DataError(
                f"row {row}: the {name} of a loss token is {values_N[position].item()}, where a finite number must be; "
                "drop the row or find what made it"
            )
