"""The catalogue says what each number means, and the book divides totals by counts once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.observability import METRICS, MetricBook, Reducer

SCORE = "reward/grade/score_mean"
TOKENS = "rollout/generate/tokens"
LAG = "train/staleness/lag_max"
RATE = "train/optim/learning_rate"


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())
def test_every_metric_states_what_it_means(metric) -> None:
    assert re.fullmatch(r"(time|[a-z]+/[a-z]+)/[a-z_]+", metric.name)
    assert metric.unit
    assert metric.population
    assert bool(metric.denominator) == (metric.reducer is Reducer.MEAN)


def test_timings_are_exactly_the_quantities_of_time() -> None:
    timings = {name for name, metric in METRICS.items() if metric.is_timing}
    assert timings == {name for name in METRICS if name.startswith("time/") or name.endswith("_per_second")}


def test_mean_divides_the_whole_total_by_the_whole_count() -> None:
    book = MetricBook(step=3)
    book.add(SCORE, 40 * 1.5, 40)
    book.add(SCORE, 360 * 0.25, 360)
    # (40 * 1.5 + 360 * 0.25) / 400; the mean of the two means would be 0.875.
    assert book.record() == {"step": 3, SCORE: 0.375}


def test_sum_max_and_last() -> None:
    book = MetricBook(step=0)
    for value in (5.0, -2.0, 3.0):
        for name in (TOKENS, LAG, RATE):
            book.add(name, value)
    record = book.record()
    assert (record[TOKENS], record[LAG], record[RATE]) == (6.0, 5.0, 3.0)


def test_max_of_negative_values_is_not_zero() -> None:
    book = MetricBook(step=0)
    book.add(LAG, -2.0)
    assert book.record()[LAG] == -2.0


def test_a_mean_of_nothing_is_absent() -> None:
    book = MetricBook(step=0)
    book.add(SCORE, 0.0, 0)
    assert book.record() == {"step": 0}


def test_reading_does_not_change_the_book() -> None:
    book = MetricBook(step=0)
    book.add(SCORE, 1.0, 2)
    assert book.record() == book.record()
    book.add(SCORE, 1.0, 2)
    assert book.record()[SCORE] == 0.5


def test_record_follows_the_catalogue_not_the_additions() -> None:
    book = MetricBook(step=0)
    book.add(RATE, 1e-5)
    book.add(TOKENS, 7.0)
    assert list(book.record()) == ["step", TOKENS, RATE]


def test_misuse_is_an_assertion_with_the_value() -> None:
    book = MetricBook(step=0)
    with pytest.raises(AssertionError, match="reward/grade/scores"):
        book.add("reward/grade/scores", 1.0, 1)
    with pytest.raises(AssertionError, match="tokens"):
        book.add(TOKENS, 1.0, 2)
    with pytest.raises(AssertionError):
        book.add(SCORE, 1.0, 0)
    with pytest.raises(AssertionError):
        book.add(SCORE, 0.0, -1)


@given(
    parts=st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 1000)), min_size=1, max_size=20),
    order=st.randoms(use_true_random=False),
)
def test_mean_does_not_depend_on_how_the_work_was_cut(parts, order) -> None:
    whole, cut = MetricBook(step=0), MetricBook(step=0)
    whole.add(SCORE, sum(total for total, _ in parts), sum(count for _, count in parts))
    order.shuffle(parts)
    for total, count in parts:
        cut.add(SCORE, total, count)
    assert cut.record() == whole.record()  # integers, so that the sums are exact
