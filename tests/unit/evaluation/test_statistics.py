"""The clustered interval against a plain reference, its coverage in simulation, and its edges."""

import math

import numpy as np
import pytest

from fourstroke.errors import DataError
from fourstroke.evaluation import clustered_estimate, pass_at_k


def test_three_tasks_by_hand() -> None:
    # Means 0.5, 1, 0: mean 0.5, standard deviation 0.5, error 0.5 / sqrt(3); t(2 degrees, 97.5 %) = 4.302653.
    estimate = clustered_estimate([np.array([-1.0, 2.0]), np.array([1.0]), np.array([0.0, 0.0, 0.0])])

    half = 4.302652729911275 * 0.5 / math.sqrt(3)
    assert estimate.mean == 0.5
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-9)
    assert (estimate.num_tasks, estimate.num_samples) == (3, 6)


def test_scores_in_zero_to_one_clip_the_interval_and_others_do_not() -> None:
    inside = clustered_estimate([np.array([0.0]), np.array([0.0]), np.array([1.0])])
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
