"""Geometry of the charts, by hand: the drawing is 480 by 190 with margins 52, 10, 10 and 24."""

import math

import pytest

from fourstroke.dashboard.charts import MOST_POINTS, Series, bars, histogram, line_chart, number_text, thinned


def test_the_ends_of_the_axes_are_the_ends_of_the_values():
    chart = line_chart("x", [Series(label="a", points=((0.0, 2.0), (5.0, 3.0), (10.0, 4.0)))])

    assert chart.lines[0].pieces == ("52.0,166.0 261.0,88.0 470.0,10.0",)
    assert chart.lines[0].last == "4"


def test_a_value_that_is_not_finite_is_a_gap_and_moves_no_axis():
    points = ((0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, math.inf), (4.0, 1.0))

    (line,) = line_chart("x", [Series(label="a", points=points)]).lines

    assert line.pieces == ("52.0,166.0 156.5,10.0", "470.0,166.0")
    assert [mark.text for mark in line.marks] == ["step 0: 1", "step 1: 2", "step 4: 1"]


def test_a_band_goes_along_its_upper_edge_and_back_along_the_lower():
    series = Series(label="a", points=((0.0, 0.5), (1.0, 0.5)), band=((0.0, 0.0, 1.0), (1.0, 0.0, 1.0)))

    (line,) = line_chart("x", [series]).lines

    assert line.bands == ("52.0,10.0 470.0,10.0 470.0,166.0 52.0,166.0",)


@pytest.mark.parametrize("points", [(), ((3.0, 0.0),), ((3.0, math.nan),)])
def test_little_or_nothing_is_drawn_without_a_fault(points):
    chart = line_chart("x", [Series(label="a", points=points)])

    assert len(chart.lines) == 1
    assert all(math.isfinite(tick.at) for tick in (*chart.x_ticks, *chart.y_ticks))


def test_steps_have_whole_ticks_inside_the_drawing():
    chart = line_chart("x", [Series(label="a", points=((1.0, 0.0), (4.0, 1.0)))])

    assert [tick.text for tick in chart.x_ticks] == ["1", "2", "3", "4"]
    assert [tick.text for tick in chart.y_ticks] == ["0", "0.25", "0.5", "0.75", "1"]
    assert all(chart.left <= tick.at <= chart.right for tick in chart.x_ticks)


def test_no_spike_is_lost_among_many_points():
    points = [(float(n), 0.0) for n in range(10_000)]
    points[1234], points[5678] = (1234.0, 9.0), (5678.0, -9.0)

    kept = thinned(points)

    assert len(kept) <= MOST_POINTS
    assert (1234.0, 9.0) in kept
    assert (5678.0, -9.0) in kept
    assert kept == sorted(kept)


def test_bars_are_shares_of_the_longest():
    assert [(bar.text, bar.length) for bar in bars([("a", 1), ("b", 0), ("c", 2)])] == [("1", 50), ("0", 0), ("2", 100)]
    assert [bar.length for bar in bars([("a", 0)])] == [0.0]


def test_a_histogram_counts_each_value_once():
    counts = [(n, n) for n in range(1, 101)]

    found = histogram(counts, num_bins=8)

    assert sum(count for _, count in found) == sum(range(1, 101))
    assert found[0] == ("1 to 13", sum(range(1, 14)))
    assert found[-1] == ("92 to 104", sum(range(92, 101)))
    assert histogram([], num_bins=8) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (-3.0, "-3"), (0.00001234, "1.234e-05"), (12345.6, "12,346"), (math.inf, "not finite")],
)
def test_numbers_read_well(value, text):
    assert number_text(value) == text
