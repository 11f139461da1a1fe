"""The clustered interval against a plain reference, its coverage in simulation, and its edges."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fourstroke.errors import DataError
from fourstroke.evaluation import clustered_estimate, paired_difference, pass_at_k, pass_hat_k


def test_three_tasks_by_hand() -> None:
    # Means 0.5, 1, 0: mean 0.5, standard deviation 0.5, error 0.5 / sqrt(3); t(2 degrees, 97.5 %) = 4.302653.
    estimate = clustered_estimate([np.array([-1.0, 2.0]), np.array([1.0]), np.array([0.0, 0.0, 0.0])])

    half = 4.302652729911275 * 0.5 / math.sqrt(3)
    assert estimate.mean == 0.5
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-9)
    assert (estimate.num_tasks, estimate.num_samples) == (3, 6)


def test_scores_in_zero_to_one_clip_the_interval_and_others_do_not() -> None:
    inside = clustered_estimate([np.zeros(2), np.zeros(2), np.ones(2)])
    outside = clustered_estimate([np.array([0.0]), np.array([0.0]), np.array([1.5])])

    assert inside.low == 0.0
    assert inside.high == 1.0
    assert outside.low < 0.0


def test_each_task_weighs_the_same() -> None:
    assert clustered_estimate([np.ones(1000), np.zeros(1)]).mean == 0.5


def test_repeating_every_sample_does_not_narrow_the_interval() -> None:
    scores = [np.array([float(task % 3 == 0), float(task % 2)]) for task in range(30)]

    once, many = clustered_estimate(scores), clustered_estimate([np.tile(values, 50) for values in scores])

    assert (many.low, many.high) == pytest.approx((once.low, once.high), rel=1e-12)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 4.5), (6.0, 2.0)])
def test_coverage_over_2000_simulated_evaluations(alpha: float, beta: float) -> None:
    rng = np.random.default_rng(11)
    chance = rng.beta(alpha, beta, size=(2000, 200, 1))
    scores = (rng.random((2000, 200, 4)) < chance).astype(np.float64)
    truth = alpha / (alpha + beta)

    estimates = [clustered_estimate(tuple(evaluation)) for evaluation in scores]

    covered = sum(estimate.low <= truth <= estimate.high for estimate in estimates) / 2000
    assert 0.94 <= covered <= 0.96  # two standard errors of 2,000 trials at 0.95


def test_one_sample_a_task_is_wilsons_interval() -> None:
    # 3 of 10: (3 + z^2 / 2) / (10 + z^2) = 0.355501 +- z sqrt(10) / (10 + z^2) sqrt(0.21 + z^2 / 40) = 0.247719.
    estimate = clustered_estimate([np.ones(1)] * 3 + [np.zeros(1)] * 7)
    reference = stats.binomtest(3, 10).proportion_ci(method="wilson")

    assert estimate.mean == 0.3
    assert (estimate.low, estimate.high) == pytest.approx((0.107782, 0.603220), abs=1e-5)
    assert (estimate.low, estimate.high) == pytest.approx((reference.low, reference.high), rel=1e-9)


@pytest.mark.parametrize("chance", [0.03, 0.1, 0.5, 0.9])
def test_coverage_of_one_sample_a_task_over_2000_simulated_evaluations(chance: float) -> None:
    scores = (np.random.default_rng(12).random((2000, 300, 1)) < chance).astype(np.float64)

    estimates = [clustered_estimate(tuple(evaluation)) for evaluation in scores]

    assert 0.94 <= sum(estimate.low <= chance <= estimate.high for estimate in estimates) / 2000 <= 0.96


def test_coverage_where_tasks_have_different_numbers_of_samples() -> None:
    rng = np.random.default_rng(13)
    counts = rng.integers(1, 9, size=(2000, 150))
    chance = rng.beta(2.0, 3.0, size=(2000, 150))
    correct = rng.binomial(counts, chance)

    estimates = [
        clustered_estimate([np.arange(n) < c for n, c in zip(*pair, strict=True)])
        for pair in zip(counts.tolist(), correct.tolist(), strict=True)
    ]

    assert 0.94 <= sum(estimate.low <= 0.4 <= estimate.high for estimate in estimates) / 2000 <= 0.96


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        (0.0, 0.0, 0.277533),  # Wilson for 0 of 10: z^2 / (n + z^2) with z = 1.959964
        (1.0, 0.722467, 1.0),
        (0.5, 0.236593, 0.763407),
        (2.0, 2 * 0.722467, 2.0),
        (-1.0, -1.0, -1.0 + 2 * 0.277533),
    ],
)
def test_equal_scores_keep_an_honest_width(value: float, low: float, high: float) -> None:
    estimate = clustered_estimate([np.full(4, value)] * 10)

    assert estimate.mean == value
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=1e-6)
    assert estimate.low <= estimate.mean <= estimate.high


@pytest.mark.parametrize("scores", [[], [np.ones(4)], [np.ones(4), np.empty(0)], [np.ones(2), np.array([np.nan])]])
def test_what_has_no_interval_is_refused(scores: list[np.ndarray]) -> None:
    with pytest.raises(DataError):
        clustered_estimate(scores)


def test_pass_at_k_equals_the_share_of_subsets_with_a_correct_one() -> None:
    for n in range(1, 9):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                subsets = [mask for mask in range(2**n) if mask.bit_count() == k]
                hits = sum(bool(mask & (2**correct - 1)) for mask in subsets)  # the first `correct` are the right ones
                assert pass_at_k(n, correct, k) == pytest.approx(hits / len(subsets), rel=1e-15)


def test_pass_at_k_is_exact_where_floats_overflow() -> None:
    assert pass_at_k(10_000, 1, 5_000) == 0.5


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_impossible_counts_are_refused(n: int, correct: int, k: int) -> None:
    with pytest.raises(DataError):
        pass_at_k(n, correct, k)


def test_pass_hat_k_equals_the_share_of_subsets_that_are_all_correct() -> None:
    for n in range(1, 9):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                subsets = [mask for mask in range(2**n) if mask.bit_count() == k]
                hits = sum(mask & (2**correct - 1) == mask for mask in subsets)
                assert pass_hat_k(n, correct, k) == pytest.approx(hits / len(subsets), rel=1e-15)


@pytest.mark.parametrize("estimator", [pass_at_k, pass_hat_k])
def test_the_estimators_of_k_have_no_bias(estimator) -> None:
    """The expectation over Binomial(n, p) is 1 - (1 - p)^k or p^k exactly."""
    n, k, p = 7, 3, 0.3
    expectation = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * estimator(n, c, k) for c in range(n + 1))

    assert expectation == pytest.approx(1 - (1 - p) ** k if estimator is pass_at_k else p**k, rel=1e-12)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_impossible_counts_of_pass_hat_k_are_refused(n: int, correct: int, k: int) -> None:
    with pytest.raises(DataError):
        pass_hat_k(n, correct, k)


# --- paired ---------------------------------------------------------------------------------------------------------


def _by_task(means) -> dict[str, list[float]]:
    return {f"task-{number}": [float(mean)] for number, mean in enumerate(means)}


def test_a_paired_difference_by_hand() -> None:
    # Differences 0.5, 0, 1 (one task is scored in the first alone, one in the second alone): mean 0.5, error
    # 0.5 / sqrt(3), t(2 degrees, 97.5 %) = 4.302653.
    first = {"a": [0.0, 1.0], "b": [1.0], "c": [0.0, 0.0, 0.0], "d": [], "e": [1.0]}
    second = {"c": [1.0], "b": [1.0, 1.0], "a": [1.0, 1.0], "d": [1.0], "e": []}

    found = paired_difference(first, second)

    half = 4.302652729911275 * 0.5 / math.sqrt(3)
    assert (found.first, found.second, found.difference) == pytest.approx((0.5, 1.0, 0.5), rel=1e-15)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-9)
    assert (found.num_tasks, found.num_only_first, found.num_only_second) == (3, 1, 1)


@given(
    st.lists(
        st.tuples(st.integers(0, 8).map(lambda n: n / 8), st.integers(0, 8).map(lambda n: n / 8)),
        min_size=2,
        max_size=20,
    ).filter(lambda pairs: len({second - first for first, second in pairs}) > 1)
)
def test_a_paired_difference_is_scipys_paired_test_and_turns_with_its_sides(pairs) -> None:
    first, second = zip(*pairs, strict=True)
    reference = stats.ttest_rel(second, first).confidence_interval()

    there, back = (
        paired_difference(_by_task(first), _by_task(second)),
        paired_difference(_by_task(second), _by_task(first)),
    )

    assert (there.low, there.high) == pytest.approx((reference.low, reference.high), rel=1e-9, abs=1e-12)
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low), rel=1e-12)
    assert there.minimum_detectable == pytest.approx(back.minimum_detectable, rel=1e-12)


def test_coverage_and_power_of_2000_simulated_comparisons() -> None:
    """Hard tasks are hard for both. At a true difference of the detectable size, four of five comparisons find it."""
    rng = np.random.default_rng(14)
    hardness = rng.normal(size=(2000, 60))
    first = hardness + 0.3 * rng.normal(size=(2000, 60))
    second = hardness + 0.3 * rng.normal(size=(2000, 60))
    # Standard error sqrt(2) 0.3 / sqrt(60); noncentrality 2.849 for 59 degrees, 95 % and 80 %.
    size = 2.849 * math.sqrt(2) * 0.3 / math.sqrt(60)

    found = [paired_difference(_by_task(a), _by_task(b + size)) for a, b in zip(first, second, strict=True)]

    assert 0.94 <= sum(one.low <= size <= one.high for one in found) / 2000 <= 0.96
    assert 0.78 <= sum(one.is_found for one in found) / 2000 <= 0.82
    assert np.mean([one.minimum_detectable for one in found]) == pytest.approx(size, rel=0.01)


def test_the_pairing_finds_what_two_intervals_hide() -> None:
    first = [n / 40 for n in range(40)]
    second = [n / 40 + 0.02 + 0.01 * (n % 2) for n in range(40)]
    one, two = (clustered_estimate([np.array([mean]) for mean in side]) for side in (first, second))

    assert one.high > two.low
    assert paired_difference(_by_task(first), _by_task(second)).is_found


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [
        (0.5, 0.5, -0.277533, 0.277533),  # u = z^2 / (10 + z^2) of the tasks could lie at -1 or at 1
        (0.0, 1.0, 1 - 2 * 0.277533, 1.0),
        (1.0, 0.0, -1.0, -1 + 2 * 0.277533),
    ],
)
def test_equal_differences_keep_an_honest_width(first, second, low, high) -> None:
    found = paired_difference(_by_task([first] * 10), _by_task([second] * 10))

    assert found.difference == second - first
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)
    assert found.minimum_detectable == pytest.approx(max(high - found.difference, found.difference - low), abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {}), ({"a": [1.0]}, {"a": [1.0]}), ({"a": [1.0], "b": [1.0]}, {"c": [1.0], "b": [1.0]}),
     ({"a": [1.0], "b": [math.nan]}, {"a": [1.0], "b": [1.0]})],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(first, second) -> None:
    with pytest.raises(DataError):
        paired_difference(first, second)
