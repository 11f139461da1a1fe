"""Each estimator of the advantage against plain loops from its paper, and against numbers worked by hand."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.algorithms import episode_advantages, soft_overlong_penalty
from fourstroke.algorithms.advantages import ADVANTAGES, greedy_baseline

PASS_K = 3
Reference = Callable[[list[float], list[int]], list[float]]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: list[float]) -> float:
    return math.sqrt(mean([(value - mean(values)) ** 2 for value in values]))


def divided(values: list[float], scale: float) -> list[float]:
    return [value / scale if scale > 1e-12 else 0.0 for value in values]


def centred(scores: list[float], lengths: list[int]) -> list[float]:
    return [score - mean(scores) for score in scores]


def standardised(scores: list[float], lengths: list[int]) -> list[float]:
    return divided(centred(scores, lengths), deviation(scores))


def others(values: list[float], index: int) -> list[float]:
    return values[:index] + values[index + 1 :]


def leave_one_out(scores: list[float], lengths: list[int]) -> list[float]:
    if len(scores) == 1:
        return [0.0]
    return [score - mean(others(scores, i)) for i, score in enumerate(scores)]


def leave_one_out_standardised(scores: list[float], lengths: list[int]) -> list[float]:
    plain = leave_one_out(scores, lengths)
    return [
        value / statistics.stdev(others(scores, i)) if len(set(others(scores, i))) > 1 else value
        for i, value in enumerate(plain)
    ]


def length_weighted(scores: list[float], lengths: list[int]) -> list[float]:
    baseline = math.fsum(length * score for length, score in zip(lengths, scores, strict=True)) / sum(lengths)
    return [score - baseline for score in scores]


def best_of_group(scores: list[float], lengths: list[int]) -> list[float]:
    return [max(scores) - max(others(scores, i)) if len(scores) > 1 else 0.0 for i in range(len(scores))]


def pass_at_k(scores: list[float], lengths: list[int]) -> list[float]:
    if len(scores) <= PASS_K:
        return [0.0] * len(scores)
    subsets = list(itertools.combinations(range(len(scores)), PASS_K))
    best = [max(scores[i] for i in subset) for subset in subsets]
    with_member = [
        mean([value for value, subset in zip(best, subsets, strict=True) if i in subset]) for i in range(len(scores))
    ]
    return divided([value - mean(best) for value in with_member], deviation(best))


# By group, then what is done over the whole step.
BY_GROUP: dict[str, Reference] = {
    "group_standardised": standardised,
    "group_centred": centred,
    "group_centred_batch_scaled": centred,
    "batch_standardised": lambda scores, lengths: scores,
    "group_centred_batch_standardised": centred,
    "leave_one_out": leave_one_out,
    "leave_one_out_standardised": leave_one_out_standardised,
    "length_weighted_baseline": length_weighted,
    "best_of_group": best_of_group,
    "pass_at_k": pass_at_k,
    # The lengths stand for a second component of the score.
    "decoupled": lambda scores, lengths: [
        first + second
        for first, second in zip(
            standardised(scores, lengths), standardised([float(length) for length in lengths], lengths), strict=True
        )
    ],
}


def reference(kind: str, scores: list[float], lengths: list[int], groups: list[int]) -> list[float]:
    found = [0.0] * len(scores)
    for group in set(groups):
        members = [i for i in range(len(scores)) if groups[i] == group]
        values = BY_GROUP[kind]([scores[i] for i in members], [lengths[i] for i in members])
        for i, value in zip(members, values, strict=True):
            found[i] = value
    if kind == "group_centred_batch_scaled":
        found = divided(found, deviation(scores))
    elif kind == "batch_standardised":
        found = divided([score - mean(scores) for score in scores], deviation(scores))
    elif kind in ("group_centred_batch_standardised", "decoupled"):
        found = divided([value - mean(found) for value in found], deviation(found))
    return found


episodes = st.lists(
    st.tuples(st.integers(-8, 8).map(lambda n: n / 8), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=20
)


def compute(kind: str, scores: list[float], lengths: list[int], groups: list[int], k: int = PASS_K) -> np.ndarray:
    return episode_advantages(
        np.array(scores),
        np.array(groups),
        lengths_E=np.array(lengths),
        components_EK=np.array([scores, lengths], dtype=np.float64).T,
        kind=kind,
        pass_k=k,
    )


def test_every_estimator_of_the_table_has_a_reference() -> None:
    assert set(BY_GROUP) == set(ADVANTAGES)


@pytest.mark.parametrize("kind", ADVANTAGES)
@given(rows=episodes)
def test_equals_plain_loops(kind: str, rows: list[tuple[float, int, int]]) -> None:
    scores, lengths, groups = (list(column) for column in zip(*rows, strict=True))

    found = compute(kind, scores, lengths, groups)

    np.testing.assert_allclose(found, reference(kind, scores, lengths, groups), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ADVANTAGES)
@given(rows=episodes, seed=st.integers(0, 1000))
def test_the_order_of_episodes_does_not_matter(kind: str, rows: list[tuple[float, int, int]], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(rows))
    scores, lengths, groups = (list(column) for column in zip(*rows, strict=True))

    found = compute(kind, *([column[i] for i in order] for column in (scores, lengths, groups)))

    np.testing.assert_allclose(found, compute(kind, scores, lengths, groups)[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", sorted(set(ADVANTAGES) - {"batch_standardised", "decoupled"}))
@pytest.mark.parametrize("score", [0.0, 0.1, 1 / 3, 1e100])
def test_uniform_groups_and_lone_members_get_exact_zeros(kind: str, score: float) -> None:
    found = compute(kind, [score] * 7 + [2.0], list(range(1, 9)), [1] * 7 + [2])
    assert found.tolist() == [0.0] * 8


# Group p holds scores 1, 0, 0, 0 of lengths 1, 2, 3, 4; group q 1, 0 of lengths 5, 5.
BY_HAND = {
    "group_standardised": [math.sqrt(3), *[-1 / math.sqrt(3)] * 3, 1, -1],
    "group_centred": [0.75, -0.25, -0.25, -0.25, 0.5, -0.5],
    # Scores of the step: mean 1/3, deviation sqrt(2)/3.
    "group_centred_batch_scaled": [x * 3 / math.sqrt(2) for x in (0.75, -0.25, -0.25, -0.25, 0.5, -0.5)],
    "batch_standardised": [math.sqrt(2), *[-1 / math.sqrt(2)] * 3, math.sqrt(2), -1 / math.sqrt(2)],
    # Squares of the centred ones: 9/16 + 3/16 + 2/4 = 5/4, over 6.
    "group_centred_batch_standardised": [x / math.sqrt(5 / 24) for x in (0.75, -0.25, -0.25, -0.25, 0.5, -0.5)],
    "leave_one_out": [1, -1 / 3, -1 / 3, -1 / 3, 1, -1],
    # The others of a zero in p are 1, 0, 0: mean 1/3, sample deviation 1/sqrt(3).
    "leave_one_out_standardised": [1, *[-1 / math.sqrt(3)] * 3, 1, -1],
    "length_weighted_baseline": [0.9, -0.1, -0.1, -0.1, 0.5, -0.5],
    "best_of_group": [1, 0, 0, 0, 1, 0],
    # p with k = 3: 3 of 4 triples hold the 1, so the mean is 3/4 and the deviation sqrt(3)/4. Of the three triples with
    # a given 0 two hold the 1. q has too few members.
    "pass_at_k": [1 / math.sqrt(3), *[(2 / 3 - 3 / 4) * 4 / math.sqrt(3)] * 3, 0, 0],
    # Lengths of p standardised: -3, -1, 1, 3 over sqrt(5); those of q are equal. Squares of the sums are
    # 8 - 8 sqrt(0.6) in p and 2 in q, over 6.
    "decoupled": [
        x / math.sqrt((8 - 8 * math.sqrt(0.6) + 2) / 6)
        for x in (
            math.sqrt(3) - 3 / math.sqrt(5),
            -1 / math.sqrt(3) - 1 / math.sqrt(5),
            -1 / math.sqrt(3) + 1 / math.sqrt(5),
            -1 / math.sqrt(3) + 3 / math.sqrt(5),
            1,
            -1,
        )
    ],
}


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_by_hand(kind: str) -> None:
    found = compute(kind, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [1, 2, 3, 4, 5, 5], [0, 0, 0, 0, 1, 1])
    np.testing.assert_allclose(found, BY_HAND[kind], rtol=1e-12, atol=1e-15)


def test_pass_at_k_of_binary_scores_is_the_closed_form_of_the_paper() -> None:
    # 8 samples, 3 right, k = 4, with the paper's formulas for a right and a wrong sample.
    all_wrong, size, k, num_wrong = math.comb(5, 4) / math.comb(8, 4), 8, 4, 5
    rate = 1 - all_wrong
    scale = math.sqrt(rate * (1 - rate))
    right = (1 - rate) / scale
    wrong = (1 - rate - math.comb(num_wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / scale

    found = compute("pass_at_k", [1.0] * 3 + [0.0] * 5, [1] * 8, [0] * 8, k=4)

    np.testing.assert_allclose(found, [right] * 3 + [wrong] * 5, rtol=1e-12)


def test_greedy_baseline() -> None:
    assert greedy_baseline(np.array([1.0, 0.0]), np.array([0.25, 0.75])).tolist() == [0.75, -0.75]


def test_decoupled_rewards_tell_apart_what_their_sum_does_not() -> None:
    # Rewards (0, 0), (1, 0) in p and (0, 0), (1, 1) in q: standardised sums are -1, 1 in both. Apart, p gives (-1, 0),
    # (1, 0) and q (-1, -1), (1, 1): sums -1, 1, -2, 2 of deviation sqrt(2.5).
    found = compute("decoupled", [0.0, 1.0, 0.0, 1.0], [0, 0, 0, 1], [0, 0, 1, 1])

    np.testing.assert_allclose(found, np.array([-1, 1, -2, 2]) / math.sqrt(2.5), rtol=1e-12)


def test_the_overlong_penalty_falls_from_the_buffer_to_the_limit() -> None:
    found = soft_overlong_penalty(np.array([10, 16, 17, 18, 20, 25]), max_tokens=20, buffer=4)
    assert found.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_ten_thousand_episodes_are_a_few_array_operations(kind: str) -> None:
    """No more than 0.1 s of this thread's own time, which load beside it does not lengthen."""
    rng = np.random.default_rng(0)
    groups = np.array([f"e0000-i{group:06d}" for group in rng.permutation(np.repeat(np.arange(1250), 8))])
    scores, lengths = rng.integers(0, 3, 10_000) / 2, rng.integers(1, 100, 10_000)
    began_s = time.thread_time()

    compute(kind, scores, lengths, groups)

    assert time.thread_time() - began_s < 0.1
