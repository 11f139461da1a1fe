"""The named algorithms: complete settings with the paper that they come from.

A bundle's values are the defaults of ``algorithm`` in a configuration; single terms may be overridden. What the names
mean is bound in ``fourstroke.algorithms``; a test holds the two tables equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A named algorithm.

    Example:
        >>> BUNDLES["grpo"].terms["aggregation"]
        'token_mean'
    """

    name: str
    purpose: str
    paper: str
    terms: dict[str, Any] = field(default_factory=dict)


BUNDLES: dict[str, Bundle] = {
    bundle.name: bundle
    for bundle in (
        Bundle(
            name="grpo",
            purpose="Verifiable rewards, several samples a prompt; rewards normalised within the group.",
            paper="Shao et al. 2024, DeepSeekMath, arXiv:2402.03300; asymmetric clip and token mean of "
            "Yu et al. 2025, DAPO, arXiv:2503.14476",
            terms={
                "advantage": "group_standardised",
                "aggregation": "token_mean",
                "clip_low": 0.2,
                "clip_high": 0.28,
                "correction": "token",
                "correction_cap": 2.0,
            },
        ),
        Bundle(
            name="dr_grpo",
            purpose="GRPO without the two biases: rewards are centred only, and the normaliser is a constant.",
            paper="Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783",
            terms={
                "advantage": "group_centred",
                "aggregation": "constant",
                "clip_low": 0.2,
                "clip_high": 0.2,
                "correction": "token",
                "correction_cap": 2.0,
            },
        ),
    )
}
