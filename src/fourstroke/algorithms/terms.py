"""The terms of each bundle's loss as data, the sums that a loss returns, and the rule for rows that may be skipped.

Loads without torch, since the controller reads it; :mod:`fourstroke.algorithms.losses` binds the terms to functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fourstroke.config import AlgorithmConfig
from fourstroke.errors import ConfigError
from fourstroke.types import RowRecord


class LossMetric(StrEnum):
    """The sums that a loss returns. All but ``LOSS`` are plain sums over loss tokens, to divide by their count."""

    LOSS = "loss"  # sum of weight * token loss; already has its denominator, so add it up and do not divide
    ENTROPY = "entropy"  # of the policy's distribution at the token, in nats
    LOG_RATIO = "log_ratio"  # current - behaviour
    ABS_LOG_RATIO = "abs_log_ratio"  # |current - behaviour|
    CLIPPED = "clipped"  # tokens whose ratio gets no gradient since a clip holds it
    IMPORTANCE_WEIGHT = "importance_weight"  # of the correction, after the cap
    TRUNCATED = "truncated"  # tokens whose importance weight the cap holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One addend of a loss.

    Attributes:
        name: Name of the term; ``losses.LOSSES`` holds its function.
        scales_with_advantage: Whether its gradient is zero at every token whose advantage is zero. A row may be skipped
            only where all terms say so; an entropy bonus or a KL penalty would not.
    """

    name: str
    scales_with_advantage: bool


TERMS: dict[str, Term] = {
    term.name: term
    for term in (
        Term(name="policy_clip", scales_with_advantage=True),
        Term(name="sequence_clip", scales_with_advantage=True),
        Term(name="geometric_clip", scales_with_advantage=True),
        Term(name="clipped_importance", scales_with_advantage=True),
        Term(name="soft_gate", scales_with_advantage=True),
        Term(name="divergence_mask", scales_with_advantage=True),
        Term(name="quadratic", scales_with_advantage=False),
        Term(name="entropy_bonus", scales_with_advantage=False),
    )
}

BUNDLE_TERMS: dict[str, tuple[Term, ...]] = {
    "grpo": (TERMS["policy_clip"],),
    "dr_grpo": (TERMS["policy_clip"],),
    "dapo": (TERMS["policy_clip"],),
    "gspo": (TERMS["sequence_clip"],),
    "gmpo": (TERMS["geometric_clip"],),
    "cispo": (TERMS["clipped_importance"],),
    "sapo": (TERMS["soft_gate"],),
    "dppo": (TERMS["divergence_mask"],),
    "dro": (TERMS["quadratic"],),
    "rloo": (TERMS["policy_clip"],),
    "reinforce_pp": (TERMS["policy_clip"],),
    "reinforce_pp_baseline": (TERMS["policy_clip"],),
    "opo": (TERMS["policy_clip"],),
    "pass_at_k": (TERMS["policy_clip"],),
    "gdpo": (TERMS["policy_clip"],),
}


def terms_of(config: AlgorithmConfig) -> tuple[Term, ...]:
    """The terms of the bundle that ``algorithm.name`` names, and the entropy bonus where it has a coefficient.

    Raises:
        ConfigError: There is no such bundle.
    """
    if config.name not in BUNDLE_TERMS:
        raise ConfigError(f"algorithm.name = {config.name!r} is no bundle; choose one of {', '.join(BUNDLE_TERMS)}")
    bonus = (TERMS["entropy_bonus"],) if config.entropy_coefficient > 0 else ()
    return (*BUNDLE_TERMS[config.name], *bonus)


def needs_gradient(rows: Sequence[RowRecord], *, config: AlgorithmConfig) -> tuple[int, ...]:
    """Positions of the rows that a backward pass can change anything for; the others may be skipped.

    A row without a loss token gives no gradient. One with the advantage 0 gives none if every term of the bundle scales
    with the advantage. Skipped rows still count in the denominators of the step.

    Args:
        rows: Rows of one update.
        config: Read for the bundle.

    Example:
        >>> row = RowRecord(group="g", member=0, row=0, num_tokens=2, num_loss_tokens=1, num_shared_tokens=0,
        ...                 advantage=0.0, weight=1.0)
        >>> needs_gradient([row], config=AlgorithmConfig.model_validate({"name": "grpo"}))
        ()
    """
    is_scaled = all(term.scales_with_advantage for term in terms_of(config))
    return tuple(
        position
        for position, row in enumerate(rows)
        if row.num_loss_tokens and not (is_scaled and row.advantage == 0.0)
    )
