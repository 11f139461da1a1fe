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

    Attributes:
        name: Value of ``algorithm.name``.
        purpose: What it is for.
        paper: Where it comes from.
        reads: Keys of ``algorithm`` that its loss reads, of those that not every loss does (:data:`LOSS_KEYS`).
        terms: Its defaults of keys of ``algorithm``.

    Example:
        >>> BUNDLES["grpo"].terms["aggregation"]
        'token_mean'
    """

    name: str
    purpose: str
    paper: str
    reads: tuple[str, ...] = ("clip_low", "clip_high", "dual_clip")
    terms: dict[str, Any] = field(default_factory=dict)


# Keys that some losses read and others do not.
LOSS_KEYS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "gate_positive",
    "gate_negative",
    "divergence",
    "divergence_limit",
    "quadratic_strength",
)
_TOKEN_CORRECTION: dict[str, Any] = {"correction": "token", "correction_cap": 2.0}
_EQUAL_CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
_HIGHER_CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}

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
                **_HIGHER_CLIP,
                **_TOKEN_CORRECTION,
            },
        ),
        Bundle(
            name="dr_grpo",
            purpose="GRPO without the two biases: rewards are centred only, and the normaliser is a constant.",
            paper="Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783",
            terms={"advantage": "group_centred", "aggregation": "constant", **_EQUAL_CLIPS, **_TOKEN_CORRECTION},
        ),
        Bundle(
            name="dapo",
            purpose="Long reasoning: as grpo, and a reply that nears the length limit loses up to 1 of its score.",
            paper="Yu et al. 2025, DAPO, arXiv:2503.14476",
            terms={
                "advantage": "group_standardised",
                "aggregation": "token_mean",
                **_HIGHER_CLIP,
                **_TOKEN_CORRECTION,
                "overlong_share": 0.2,
            },
        ),
        Bundle(
            name="gspo",
            purpose="Large and mixture-of-experts models: one ratio and one clip for a whole reply.",
            paper="Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071",
            terms={
                "advantage": "group_standardised",
                "aggregation": "sequence_mean",
                "clip_low": 3e-4,
                "clip_high": 4e-4,
                **_TOKEN_CORRECTION,
            },
        ),
        Bundle(
            name="gmpo",
            purpose="As gspo, but tokens are clipped, widely, before their geometric mean is taken.",
            paper="Zhao et al. 2025, Geometric-Mean Policy Optimization, arXiv:2507.20673",
            reads=("clip_low", "clip_high"),
            terms={
                "advantage": "group_standardised",
                "aggregation": "sequence_mean",
                "clip_low": 0.33,
                "clip_high": 0.49,
                **_TOKEN_CORRECTION,
            },
        ),
        Bundle(
            name="cispo",
            purpose="Stale data, rare decisive tokens: ratios are clipped as weights, so every token keeps a gradient.",
            paper="MiniMax 2025, MiniMax-M1, arXiv:2506.13585; bound of Khatri et al. 2025, ScaleRL, arXiv:2510.13786",
            reads=("clip_low", "clip_high"),
            terms={
                "advantage": "group_standardised",
                "aggregation": "token_mean",
                "clip_low": 1.0,
                "clip_high": 4.0,
                **_TOKEN_CORRECTION,
            },
        ),
        Bundle(
            name="sapo",
            purpose="A smooth gate in place of a clip, steeper for negative advantages.",
            paper="Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv:2511.20347",
            reads=("gate_positive", "gate_negative"),
            terms={"advantage": "group_standardised", "aggregation": "sequence_mean", **_TOKEN_CORRECTION},
        ),
        Bundle(
            name="dppo",
            purpose="Stale data: tokens are held by how far their probability moved, which spares rare tokens.",
            paper="Qi et al. 2026, Rethinking the Trust Region in LLM RL, arXiv:2602.04879",
            reads=("divergence", "divergence_limit"),
            terms={
                "advantage": "group_centred",
                "aggregation": "token_mean",
                "correction": "none",
                "correction_cap": 20.0,
            },
        ),
        Bundle(
            name="dro",
            purpose="No ratio and no clip: a square around the policy that sampled holds the new one near.",
            paper="Richemond et al. 2024, Offline Regularised RL for LLM Alignment, arXiv:2405.19107",
            reads=("quadratic_strength",),
            terms={
                "advantage": "group_centred",
                "aggregation": "token_mean",
                "correction": "none",
                "correction_cap": 1.0,
            },
        ),
        Bundle(
            name="rloo",
            purpose="The plain policy gradient of whole replies; the baseline is the mean of the other samples.",
            paper="Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740",
            terms={"advantage": "leave_one_out", "aggregation": "sequence_sum", **_EQUAL_CLIPS, **_TOKEN_CORRECTION},
        ),
        Bundle(
            name="reinforce_pp",
            purpose="One sample a prompt is enough: rewards are normalised over the whole step, without groups.",
            paper="Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
            terms={"advantage": "batch_standardised", "aggregation": "token_mean", **_EQUAL_CLIPS, **_TOKEN_CORRECTION},
        ),
        Bundle(
            name="reinforce_pp_baseline",
            purpose="The group's mean is the baseline, and the step's deviation the scale.",
            paper="Hu et al. 2025, REINFORCE++, arXiv:2501.03262",
            terms={
                "advantage": "group_centred_batch_standardised",
                "aggregation": "token_mean",
                **_EQUAL_CLIPS,
                **_TOKEN_CORRECTION,
            },
        ),
        Bundle(
            name="opo",
            purpose="Exactly on-policy training with the baseline of least variance, a mean weighted by length.",
            paper="Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585",
            terms={
                "advantage": "length_weighted_baseline",
                "aggregation": "token_mean",
                **_EQUAL_CLIPS,
                **_TOKEN_CORRECTION,
            },
        ),
        Bundle(
            name="pass_at_k",
            purpose="Exploration: rewards the best of k samples, so that different tries pay.",
            paper="Chen et al. 2025, Pass@k Training, arXiv:2508.10751",
            terms={"advantage": "pass_at_k", "aggregation": "token_mean", **_HIGHER_CLIP, **_TOKEN_CORRECTION},
        ),
        Bundle(
            name="gdpo",
            purpose="Graders with several components: each is normalised apart, so that none drowns another.",
            paper="Liu et al. 2026, GDPO, arXiv:2601.05242",
            terms={"advantage": "decoupled", "aggregation": "token_mean", **_HIGHER_CLIP, **_TOKEN_CORRECTION},
        ),
    )
}
