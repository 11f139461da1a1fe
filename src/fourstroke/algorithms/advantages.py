"""Advantages from the scores of episodes. NumPy in float64, never torch: they are scalars on the controller.

Only scored members come in: a member whose grader failed has no number, so it is neither trained on nor in a baseline.
Groups go by id: episodes of one group may stand anywhere. The estimators work on a table with a row for each group, so
that a step of many thousand episodes is a few array operations.

Shape letters: ``E`` episodes of a step, ``P`` groups, ``G`` places of the largest group, ``K`` components of a score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scored episodes of a step as a table of groups.

    Attributes:
        values_PG: float64, finite; 0 where there is no member.
        lengths_PG: float64, sampled tokens of the episode; 0 where there is no member.
        is_member_PG: Whether there is a member.
        pass_k: k of the estimator ``pass_at_k``.
        components_KPG: float64, the named parts of each score; read by ``decoupled``.
    """

    values_PG: np.ndarray
    lengths_PG: np.ndarray
    is_member_PG: np.ndarray
    pass_k: int
    components_KPG: np.ndarray

    @property
    def sizes_P1(self) -> np.ndarray:
        """int64 [P, 1]: members of each group."""
        return np.asarray(self.is_member_PG.sum(axis=1, keepdims=True))

    @property
    def is_uniform_P1(self) -> np.ndarray:
        """Whether all scores of a group are exactly equal.

        Decided by equality and not by a computed deviation, which rounding can make slightly larger than zero.
        """
        is_equal_PG = (self.values_PG == self.values_PG[:, :1]) | ~self.is_member_PG
        return np.asarray(is_equal_PG.all(axis=1, keepdims=True))

    @property
    def centred_PG(self) -> np.ndarray:
        """``score - mean of the group``; exact zeros in uniform groups and where there is no member."""
        return self.with_baseline(self.values_PG.sum(axis=1, keepdims=True) / self.sizes_P1)

    def with_baseline(self, baseline_PG: np.ndarray) -> np.ndarray:
        """``score - baseline``; exact zeros in uniform groups and where there is no member."""
        return np.where(self.is_uniform_P1 | ~self.is_member_PG, 0.0, self.values_PG - baseline_PG)


def is_uniform(scores_G: np.ndarray) -> bool:
    """Whether all scores are exactly equal, so that the group says nothing about what to prefer.

    Example:
        >>> is_uniform(np.array([0.7, 0.7, 0.7])), is_uniform(np.array([1.0, 0.0]))
        (True, False)
    """
    return bool(np.all(scores_G == scores_G[:1]))


def group_standardised(scores: Scores) -> np.ndarray:
    """``(score - mean) / std`` of the group, with the population deviation (divided by G) and no epsilon.

    The scores are first moved to the range 0 to 1, which changes nothing in exact arithmetic: the deviation of such
    numbers is at least ``1 / sqrt(2 G)``, so that nearly equal or very large scores can neither blow up nor overflow.
    No advantage is larger than ``sqrt(G - 1)``.

    Source: GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2. The paper leaves the kind of deviation open.
    """
    is_member_PG, is_uniform_P1 = scores.is_member_PG, scores.is_uniform_P1
    # A power of two, so that nothing is rounded, and the subtraction below can neither overflow nor underflow.
    scaled_PG = np.ldexp(scores.values_PG, -np.frexp(np.abs(scores.values_PG).max(axis=1, keepdims=True))[1])
    lowest_P1 = np.where(is_member_PG, scaled_PG, math.inf).min(axis=1, keepdims=True)
    highest_P1 = np.where(is_member_PG, scaled_PG, -math.inf).max(axis=1, keepdims=True)
    range_P1 = np.where(is_uniform_P1, 1.0, highest_P1 - lowest_P1)
    unit_PG = np.where(is_member_PG, (scaled_PG - lowest_P1) / range_P1, 0.0)
    mean_P1 = unit_PG.sum(axis=1, keepdims=True) / scores.sizes_P1
    centred_PG = np.where(is_uniform_P1 | ~is_member_PG, 0.0, unit_PG - mean_P1)
    variance_P1 = (centred_PG**2).sum(axis=1, keepdims=True) / scores.sizes_P1
    return np.asarray(centred_PG / np.sqrt(np.where(is_uniform_P1, 1.0, variance_P1)))


def group_centred(scores: Scores) -> np.ndarray:
    """``score - mean`` of the group: without the deviation, which favours questions that are nearly always or never
    solved.

    Source: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2.
    """
    return scores.centred_PG


def group_centred_batch_scaled(scores: Scores) -> np.ndarray:
    """``score - mean`` of the group, divided by the population deviation of all scores of the step.

    Source: Liu et al. 2025, "Tricks or Traps?", arXiv:2508.08221: GRPO's deviation taken over the batch.
    """
    values_E = scores.values_PG[scores.is_member_PG]
    if is_uniform(values_E):
        return np.zeros_like(scores.values_PG)
    return np.asarray(scores.centred_PG / values_E.std())


def batch_standardised(scores: Scores) -> np.ndarray:
    """``(score - mean) / std`` over all episodes of the step, whatever their group; one episode a prompt is enough.

    Source: REINFORCE++, Hu et al. 2025, arXiv:2501.03262. Each episode counts once, whatever its length.
    """
    values_E = scores.values_PG[scores.is_member_PG]
    if is_uniform(values_E):
        return np.zeros_like(scores.values_PG)
    return np.where(scores.is_member_PG, (scores.values_PG - values_E.mean()) / values_E.std(), 0.0)


def group_centred_batch_standardised(scores: Scores) -> np.ndarray:
    """``score - mean`` of the group, divided by the population deviation of these differences over the step.

    Their mean over the step is zero by construction. Source: REINFORCE++ with baseline, arXiv:2501.03262.
    """
    centred_PG = scores.centred_PG
    deviation = math.sqrt(float((centred_PG**2).sum()) / int(scores.is_member_PG.sum()))
    return centred_PG / deviation if deviation > 0 else centred_PG


def leave_one_out(scores: Scores) -> np.ndarray:
    """``score - mean of the other members``, which is ``G / (G - 1) * (score - mean)``. A lone member gets 0.

    Source: RLOO, Ahmadian et al. 2024, arXiv:2402.14740.
    """
    return np.asarray(scores.centred_PG * (scores.sizes_P1 / np.maximum(scores.sizes_P1 - 1, 1)))


def leave_one_out_standardised(scores: Scores) -> np.ndarray:
    """``(score - mean of the others) / sample deviation of the others``, unscaled where the others are all equal.

    Whether they are equal is decided by equality: a deviation that is nearly zero would make the odd one out explode.
    Sums over the others are made without subtracting the member, which would leave only rounding of a far-off score.
    """
    scaled_PG = leave_one_out(scores)
    is_member_PG, num_others_P1 = scores.is_member_PG, scores.sizes_P1 - 1
    median_P1 = np.nanmedian(np.where(is_member_PG, scores.values_PG, math.nan), axis=1, keepdims=True)
    shifted_PG = np.where(is_member_PG, scores.values_PG - median_P1, 0.0)
    lowest_PG = _of_the_others(np.where(is_member_PG, shifted_PG, math.inf), np.minimum, math.inf)
    highest_PG = _of_the_others(np.where(is_member_PG, shifted_PG, -math.inf), np.maximum, -math.inf)
    sum_PG, square_PG = (_of_the_others(values_PG, np.add, 0.0) for values_PG in (shifted_PG, shifted_PG**2))
    is_scaled_PG = is_member_PG & (lowest_PG < highest_PG)
    variance_PG = (square_PG - sum_PG**2 / np.maximum(num_others_P1, 1)) / np.maximum(num_others_P1 - 1, 1)
    # Two unequal numbers in n have a sum of squares of at least half their squared distance; rounding may say less.
    floor_PG = np.where(is_scaled_PG, highest_PG - lowest_PG, 1.0) ** 2 / 2 / np.maximum(num_others_P1 - 1, 1)
    return np.asarray(scaled_PG / np.where(is_scaled_PG, np.sqrt(np.maximum(variance_PG, floor_PG)), 1.0))


def _of_the_others(values_PG: np.ndarray, operation: np.ufunc, neutral: float) -> np.ndarray:
    """The operation over all places of a group but the place itself: what comes before, with what comes after."""
    edge_P1 = np.full((len(values_PG), 1), neutral)
    before_PG = operation.accumulate(np.hstack([edge_P1, values_PG[:, :-1]]), axis=1)
    after_PG = operation.accumulate(np.hstack([edge_P1, values_PG[:, :0:-1]]), axis=1)[:, ::-1]
    return np.asarray(operation(before_PG, after_PG))


def length_weighted_baseline(scores: Scores) -> np.ndarray:
    """``score - baseline``, where the baseline is the group's mean score weighted by length.

    It is the baseline of least variance if a reply's squared gradient grows with its length.
    Source: OPO, Hao et al. 2025, arXiv:2505.23585.
    """
    total_P1 = scores.lengths_PG.sum(axis=1, keepdims=True)
    weighted_P1 = (scores.lengths_PG * scores.values_PG).sum(axis=1, keepdims=True)
    return scores.with_baseline(np.where(total_P1 > 0, weighted_P1 / np.maximum(total_P1, 1), 0.0))


def best_of_group(scores: Scores) -> np.ndarray:
    """The best member gets its lead over the second best, all others 0: what each adds to the group's maximum.

    Source: Tang et al. 2025, arXiv:2503.19595 (the maximum with a leave-one-out control variate).
    """
    candidates_PG = np.where(scores.is_member_PG, scores.values_PG, -math.inf)
    is_first_PG = np.arange(candidates_PG.shape[1]) == candidates_PG.argmax(axis=1)[:, None]
    second_P1 = np.where(is_first_PG, -math.inf, candidates_PG).max(axis=1, keepdims=True, initial=-math.inf)
    second_P1 = np.where(scores.is_uniform_P1, 0.0, second_P1)
    return np.where(is_first_PG & ~scores.is_uniform_P1, scores.values_PG - second_P1, 0.0)


def pass_at_k(scores: Scores) -> np.ndarray:
    """How much a member raises the best score of k members drawn from its group, in deviations of that best score.

    ``(E[max of k | the member is drawn] - E[max of k]) / std(max of k)`` over all subsets of k members, in closed form
    from the sorted scores. With scores 0 and 1 the expectation is pass@k. A group of at most k members gives zeros.
    Source: Chen et al. 2025, "Pass@k Training", arXiv:2508.10751, there for scores 0 and 1.
    """
    advantages_PG = np.zeros_like(scores.values_PG)
    sizes_P = scores.sizes_P1[:, 0]
    for size in np.unique(sizes_P[sizes_P > scores.pass_k]):
        groups = np.flatnonzero((sizes_P == size) & ~scores.is_uniform_P1[:, 0])
        if len(groups) == 0:
            continue
        places_PG = np.argsort(~scores.is_member_PG[groups], axis=1, kind="stable")[:, :size]
        found_PG = _subset_advantages(np.take_along_axis(scores.values_PG[groups], places_PG, axis=1), k=scores.pass_k)
        advantages_PG[groups[:, None], places_PG] = found_PG
    return advantages_PG


def _subset_advantages(values_PG: np.ndarray, *, k: int) -> np.ndarray:
    """:func:`pass_at_k` of groups that are all whole."""
    size = values_PG.shape[1]
    order_PG = np.argsort(values_PG, axis=1, kind="stable")
    sorted_PG = np.take_along_axis(values_PG, order_PG, axis=1)
    # Shares of the subsets of k whose largest member is the one at this rank; of those that hold another, lower one.
    largest_G = np.array([math.comb(rank, k - 1) / math.comb(size, k) for rank in range(size)])
    itself_G = np.array([math.comb(rank, k - 1) / math.comb(size - 1, k - 1) for rank in range(size)])
    above_G = np.array([math.comb(rank - 1, k - 2) if rank else 0 for rank in range(size)]) / math.comb(size - 1, k - 1)
    mean_P1 = (sorted_PG * largest_G).sum(axis=1, keepdims=True)
    variance_P1 = ((sorted_PG - mean_P1) ** 2 * largest_G).sum(axis=1, keepdims=True)
    shares_PG = sorted_PG * above_G
    beyond_PG = shares_PG[:, ::-1].cumsum(axis=1)[:, ::-1] - shares_PG
    is_constant_P1 = sorted_PG[:, k - 1 : k] == sorted_PG[:, -1:]
    gains_PG = np.where(is_constant_P1, 0.0, beyond_PG + sorted_PG * itself_G - mean_P1)
    advantages_PG = np.empty_like(values_PG)
    scale_P1 = np.sqrt(np.where(is_constant_P1, 1.0, variance_P1))
    np.put_along_axis(advantages_PG, order_PG, gains_PG / scale_P1, axis=1)
    return advantages_PG


def decoupled(scores: Scores) -> np.ndarray:
    """Each component of the score standardised within its group before they are added; the sum over the step.

    Adding first and standardising then gives different components the same advantage whenever their sums agree.
    Source: GDPO, Liu et al. 2026, arXiv:2601.05242, with equal weights.
    """
    parts = [group_standardised(replace(scores, values_PG=values_PG)) for values_PG in scores.components_KPG]
    sums_PG = np.sum(parts, axis=0)
    sums_E = sums_PG[scores.is_member_PG]
    deviation = float(sums_E.std())
    # Equal sums may differ by rounding, and are then no reason to prefer any.
    if deviation <= 1e-12 * len(parts):
        return np.zeros_like(sums_PG)
    return np.where(scores.is_member_PG, (sums_PG - sums_E.mean()) / deviation, 0.0)


ADVANTAGES: dict[str, Callable[[Scores], np.ndarray]] = {
    "group_standardised": group_standardised,
    "group_centred": group_centred,
    "group_centred_batch_scaled": group_centred_batch_scaled,
    "batch_standardised": batch_standardised,
    "group_centred_batch_standardised": group_centred_batch_standardised,
    "leave_one_out": leave_one_out,
    "leave_one_out_standardised": leave_one_out_standardised,
    "length_weighted_baseline": length_weighted_baseline,
    "best_of_group": best_of_group,
    "pass_at_k": pass_at_k,
    "decoupled": decoupled,
}

# Those whose value follows from the scores of the group alone: no lengths, components, settings or other groups.
OF_GROUP_SCORES = frozenset(
    {"group_standardised", "group_centred", "leave_one_out", "leave_one_out_standardised", "best_of_group"}
)


def episode_advantages(
    scores_E: np.ndarray,
    groups_E: np.ndarray,
    *,
    lengths_E: np.ndarray,
    components_EK: np.ndarray,
    kind: str,
    pass_k: int,
) -> np.ndarray:
    """Advantages of the scored episodes of a step, by the name in ``algorithm.advantage``.

    Args:
        scores_E: Finite scores.
        groups_E: Ids of the episodes' groups, of any type that sorts.
        lengths_E: Sampled tokens of each; read by ``length_weighted_baseline``.
        components_EK: Finite parts of each score; read by ``decoupled``, which needs at least one.
        kind: A key of :data:`ADVANTAGES`.
        pass_k: k of ``pass_at_k``, at least 2; others do not read it.

    Returns:
        float64 [E], in the order of the scores. Exact zeros where all scores of a group are equal, a lone member's
        included, but for ``batch_standardised``, which knows no groups, and ``decoupled``, which reads no scores.

    Example:
        >>> episode_advantages(np.array([1.0, 0.0, 5.0, 1.0]), np.array(["p", "q", "q", "p"]),
        ...                    lengths_E=np.ones(4), components_EK=np.zeros((4, 0)), kind="group_centred",
        ...                    pass_k=2).tolist()
        [0.0, -2.5, 2.5, 0.0]
    """
    scores_E, lengths_E, components_EK = (
        np.asarray(values, dtype=np.float64) for values in (scores_E, lengths_E, components_EK)
    )
    assert scores_E.ndim == 1, scores_E.shape
    assert scores_E.shape == lengths_E.shape == np.shape(groups_E), (scores_E.shape, lengths_E.shape)
    assert len(components_EK) == len(scores_E), (components_EK.shape, scores_E.shape)
    assert np.all(np.isfinite(scores_E)), scores_E
    assert kind != "decoupled" or (components_EK.shape[1] > 0 and np.all(np.isfinite(components_EK))), components_EK
    if len(scores_E) == 0:
        return np.zeros(0)
    rows_E, places_E = group_places(groups_E)
    shape = (int(rows_E.max()) + 1, int(places_E.max()) + 1)
    values_PG, lengths_PG, is_member_PG = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=bool)
    values_PG[rows_E, places_E] = scores_E
    lengths_PG[rows_E, places_E] = lengths_E
    is_member_PG[rows_E, places_E] = True
    components_KPG = np.zeros((components_EK.shape[1], *shape))
    components_KPG[:, rows_E, places_E] = components_EK.T
    table = Scores(
        values_PG=values_PG,
        lengths_PG=lengths_PG,
        is_member_PG=is_member_PG,
        pass_k=pass_k,
        components_KPG=components_KPG,
    )
    return np.asarray(ADVANTAGES[kind](table)[rows_E, places_E])


def group_places(groups_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row of each episode's group and place of the episode in it, places in the order of the episodes.

    Example:
        >>> [values.tolist() for values in group_places(np.array(["q", "p", "q"]))]
        [[1, 0, 1], [0, 0, 1]]
    """
    _, rows_E, sizes_P = np.unique(groups_E, return_inverse=True, return_counts=True)
    order_E = np.argsort(rows_E, kind="stable")
    places_E = np.empty(len(rows_E), dtype=np.int64)
    places_E[order_E] = np.arange(len(rows_E)) - np.repeat(np.cumsum(sizes_P) - sizes_P, sizes_P)
    return rows_E, places_E


def group_advantages(scores_G: np.ndarray, *, kind: str) -> np.ndarray:
    """Advantages of one group whose members have equal lengths and scores of one component.

    Args:
        scores_G: [G], finite; the scored members only.
        kind: A key of :data:`ADVANTAGES`.

    Returns:
        float64 [G].

    Example:
        >>> group_advantages(np.array([1.0, 0.0]), kind="group_centred").tolist()
        [0.5, -0.5]
    """
    size = len(np.asarray(scores_G))
    return episode_advantages(
        scores_G,
        np.zeros(size, np.int64),
        lengths_E=np.ones(size),
        components_EK=np.reshape(scores_G, (size, 1)),
        kind=kind,
        pass_k=2,
    )


def greedy_baseline(scores_E: np.ndarray, greedy_scores_E: np.ndarray) -> np.ndarray:
    """``score - score of the greedy reply to the same prompt``.

    Source: ReMax, Li et al. 2023, arXiv:2310.10505.

    Example:
        >>> greedy_baseline(np.array([1.0, 0.0]), np.array([0.5, 0.0])).tolist()
        [0.5, 0.0]
    """
    return np.asarray(np.asarray(scores_E, np.float64) - np.asarray(greedy_scores_E, np.float64))


def soft_overlong_penalty(lengths_E: np.ndarray, *, max_tokens: int, buffer: int) -> np.ndarray:
    """0 up to ``max_tokens - buffer`` tokens, falling linearly to -1 at ``max_tokens``; to be added to the score.

    Source: DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13.

    Example:
        >>> soft_overlong_penalty(np.array([60, 80, 90, 100]), max_tokens=100, buffer=20).tolist()
        [0.0, 0.0, -0.5, -1.0]
    """
    assert 0 < buffer <= max_tokens, (buffer, max_tokens)
    return np.clip((max_tokens - buffer - np.asarray(lengths_E)) / buffer, -1.0, 0.0)
