"""Tokens picked by a statistic of the step, against plain loops and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.algorithms.selection import (
    beyond_second_moment,
    in_covariance_band,
    largest_covariance,
    token_covariances,
)

pairs = st.lists(st.tuples(st.floats(-5, 0), st.floats(-2, 2)), min_size=1, max_size=15)


@given(rows=pairs)
def test_covariances_equal_plain_loops(rows: list[tuple[float, float]]) -> None:
    mean_logprob, mean_advantage = (math.fsum(row[k] for row in rows) / len(rows) for k in (0, 1))
    expected = [(logprob - mean_logprob) * (advantage - mean_advantage) for logprob, advantage in rows]

    found = token_covariances(*(np.array([row[k] for row in rows]) for k in (0, 1)))

    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_the_band_draws_its_share_from_what_lies_in_it() -> None:
    covariances = np.array([0.0, 1.0, 2.0, 3.0, 9.0, 2.5, 1.5, -1.0])

    drawn = [in_covariance_band(covariances, low=1.0, high=3.0, fraction=0.25, seed=seed) for seed in range(40)]

    assert {int(is_selected.sum()) for is_selected in drawn} == {2}  # a quarter of 8
    assert np.flatnonzero(np.any(drawn, axis=0)).tolist() == [1, 2, 3, 5, 6]
    again = in_covariance_band(covariances, low=1.0, high=3.0, fraction=0.25, seed=7)
    assert again.tolist() == drawn[7].tolist()


def test_the_band_gives_no_more_than_it_holds() -> None:
    found = in_covariance_band(np.array([0.0, 2.0, 9.0]), low=1.0, high=5.0, fraction=1.0, seed=0)
    assert found.tolist() == [False, True, False]


@given(rows=pairs, fraction=st.floats(0, 1))
def test_the_largest_are_none_smaller_than_the_rest(rows: list[tuple[float, float]], fraction: float) -> None:
    covariances = np.array([row[1] for row in rows])

    is_selected = largest_covariance(covariances, fraction=fraction)

    assert int(is_selected.sum()) == round(fraction * len(rows))
    if 0 < is_selected.sum() < len(rows):
        assert covariances[is_selected].min() >= covariances[~is_selected].max()


@given(ratios=st.lists(st.floats(-2, 2), max_size=15), limit=st.floats(1e-4, 1))
def test_the_second_moment_is_brought_down_by_dropping_the_largest_one_by_one(
    ratios: list[float], limit: float
) -> None:
    remaining = dict(enumerate(ratio**2 for ratio in ratios))
    while remaining and sum(remaining.values()) / len(remaining) > limit:
        largest = max(remaining, key=lambda place: (remaining[place], place))
        del remaining[largest]

    is_selected = beyond_second_moment(np.array(ratios), limit=limit)

    assert len(ratios) - int(is_selected.sum()) == len(remaining)
    assert sorted(np.array(ratios)[~is_selected] ** 2) == pytest.approx(sorted(remaining.values()))


def test_a_second_moment_at_the_limit_is_kept() -> None:
    # Squares 0.25, 0.25 and 4: the mean of the first two is the limit itself, and with the third it is 1.5.
    assert beyond_second_moment(np.array([0.5, 2.0, -0.5]), limit=0.25).tolist() == [False, True, False]


def test_no_tokens() -> None:
    empty = np.zeros(0)
    assert largest_covariance(token_covariances(empty, empty), fraction=0.5).shape == (0,)
    assert in_covariance_band(empty, low=0, high=1, fraction=0.5, seed=0).shape == (0,)
    assert beyond_second_moment(empty, limit=0.04).shape == (0,)
