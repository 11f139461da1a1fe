"""Advantages against plain loops in float64, numbers worked by hand, and their invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.algorithms import group_advantages, is_uniform

KINDS = ("group_standardised", "group_centred")
scores = st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=1, max_size=12)


def reference(scores_G: list[float], kind: str) -> list[float]:
    mean = math.fsum(scores_G) / len(scores_G)
    centred = [score - mean for score in scores_G]
    if kind == "group_centred":
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / std if std > 1e-12 else 0.0 for value in centred]


@pytest.mark.parametrize("kind", KINDS)
@given(scores_G=scores)
def test_equals_plain_loops(kind: str, scores_G: list[float]) -> None:
    found = group_advantages(np.array(scores_G), kind=kind)
    np.testing.assert_allclose(found, reference(scores_G, kind), rtol=0, atol=1e-12)


def test_by_hand() -> None:
    # Mean 1/3; deviations 2/3, -1/3, -1/3; population std sqrt(2)/3; quotients sqrt(2), -1/sqrt(2), -1/sqrt(2).
    found = group_advantages(np.array([1.0, 0.0, 0.0]), kind="group_standardised")
    np.testing.assert_allclose(found, [math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2)], rtol=1e-15)
    found = group_advantages(np.array([1.0, 0.0, 0.0]), kind="group_centred")
    np.testing.assert_allclose(found, [2 / 3, -1 / 3, -1 / 3], rtol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("score", [0.0, 0.1, 0.7, 1 / 3, 1e300])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_equal_scores_give_exact_zeros(kind: str, score: float, size: int) -> None:
    # The mean of ten times 0.1 is not 0.1 in floating point; a computed deviation would not be zero.
    assert group_advantages(np.full(size, score), kind=kind).tolist() == [0.0] * size


@given(scores_G=scores)
def test_standardised_is_bounded_and_has_unit_deviation(scores_G: list[float]) -> None:
    found = group_advantages(np.array(scores_G), kind="group_standardised")
    assert np.all(np.abs(found) <= math.sqrt(len(scores_G) - 1) + 1e-12)
    assert abs(found.mean()) < 1e-12
    if not is_uniform(np.array(scores_G)):
        assert abs(np.mean(found**2) - 1) < 1e-12


@pytest.mark.parametrize("pair", [(0.3, 0.1 + 0.2), (-1.7e308, 1.7e308), (0.0, 5e-324)])
def test_tiny_and_huge_differences_do_not_explode(pair: tuple[float, float]) -> None:
    found = group_advantages(np.array(pair), kind="group_standardised")
    np.testing.assert_allclose(found, [-1.0, 1.0], rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_a_programmers_mistake(bad: float) -> None:
    with pytest.raises(AssertionError):
        group_advantages(np.array([1.0, bad]), kind="group_centred")
