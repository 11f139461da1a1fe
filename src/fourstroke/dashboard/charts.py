"""Charts as geometry: from numbers to the coordinates that the templates write as SVG. No HTML, no colours.

The origin is at the upper left; one unit is one pixel of the drawing, which the page scales to its width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_Place = Callable[[float, float], tuple[float, float]]

WIDTH, HEIGHT = 480, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 24
# More points than this are drawn by the extremes of as many buckets, so that no spike is lost.
MOST_POINTS = 400
# Up to so many points each is marked.
_MOST_MARKS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values over steps; a value that is not finite is a gap.

    Attributes:
        label: Whose.
        points: (x, y), ascending in x.
        band: (x, low, high), ascending in x; may be empty.

    Example:
        >>> Series(label="a", points=((1.0, 0.5),)).band
        ()
    """

    label: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point that is marked, with what it says."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series as drawn: its unbroken pieces, its band and its marks; ``colour`` is a number from 0."""

    label: str
    colour: int
    pieces: tuple[str, ...]
    bands: tuple[str, ...]
    marks: tuple[Mark, ...]
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A tick of an axis: where, and what stands there."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """A chart of lines, ready to be written."""

    title: str
    unit: str
    note: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row of a chart of bars: its label, its value as text, and its share of the longest bar, 0 to 100."""

    label: str
    text: str
    length: float
    kind: str = ""


def number_text(value: float) -> str:
    """A number as people read it: four digits that count.

    Example:
        >>> number_text(0.123456), number_text(1234567.0), number_text(3.0), number_text(float("nan"))
        ('0.1235', '1,234,567', '3', 'not finite')
    """
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def line_chart(title: str, series: Sequence[Series], *, unit: str = "", note: str = "") -> LineChart:
    """Lines over steps, on axes that hold every finite value and band.

    Example:
        >>> chart = line_chart("score", [Series(label="a", points=((1.0, 0.0), (3.0, 1.0)))])
        >>> chart.lines[0].pieces
        ('52.0,166.0 470.0,10.0',)
    """
    xs = [x for one in series for x, y in one.points if math.isfinite(y)] or [0.0]
    ys = [y for one in series for _, y in one.points if math.isfinite(y)]
    ys += [end for one in series for _, low, high in one.band for end in (low, high)]
    (x_low, x_high), (y_low, y_high) = _padded(xs), _padded(ys or [0.0])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_low) / (y_high - y_low)
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    return LineChart(
        title=title,
        unit=unit,
        note=note,
        lines=tuple(
            Line(
                label=one.label,
                colour=colour,
                pieces=tuple(_path(place(x, y) for x, y in piece) for piece in _unbroken(thinned(one.points))),
                bands=_bands(one, place=place),
                marks=_marks(one, place=place),
                last=number_text(one.points[-1][1]) if one.points else "-",
            )
            for colour, one in enumerate(series)
        ),
        x_ticks=tuple(Tick(at=place(x, y_low)[0], text=number_text(x)) for x in _ticks(x_low, x_high, whole=True)),
        y_ticks=tuple(Tick(at=place(x_low, y)[1], text=number_text(y)) for y in _ticks(y_low, y_high, whole=False)),
    )


def bars(rows: Iterable[tuple[str, float]], *, kind: str = "", unit: str = "") -> tuple[Bar, ...]:
    """Bars in the order given, the largest value filling the width.

    Example:
        >>> [bar.length for bar in bars([("a", 1), ("b", 4)])]
        [25.0, 100.0]
    """
    kept = list(rows)
    largest = max((value for _, value in kept), default=0.0)
    suffix = f" {unit}" if unit else ""
    return tuple(
        Bar(
            label=label,
            text=f"{number_text(value)}{suffix}",
            length=100 * value / largest if largest > 0 else 0.0,
            kind=kind,
        )
        for label, value in kept
    )


def histogram(counts: Iterable[tuple[int, int]], *, num_bins: int) -> list[tuple[str, int]]:
    """Counts of whole numbers by bins of one width, the label of each its first and last number.

    Example:
        >>> histogram([(0, 2), (1, 1), (9, 4)], num_bins=5)
        [('0 to 1', 3), ('2 to 3', 0), ('4 to 5', 0), ('6 to 7', 0), ('8 to 9', 4)]
    """
    kept = list(counts)
    if not kept:
        return []
    low, high = min(value for value, _ in kept), max(value for value, _ in kept)
    width = max(1, math.ceil((high - low + 1) / num_bins))
    totals = [0] * math.ceil((high - low + 1) / width)
    for value, count in kept:
        totals[(value - low) // width] += count
    return [
        (f"{low + n * width}" if width == 1 else f"{low + n * width} to {low + (n + 1) * width - 1}", total)
        for n, total in enumerate(totals)
    ]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """All points, or the lowest and the highest of each of ``MOST_POINTS / 2`` buckets, in order.

    Example:
        >>> len(thinned([(float(n), 0.0) for n in range(10_000)])) <= MOST_POINTS
        True
    """
    if len(points) <= MOST_POINTS:
        return list(points)
    kept = []
    for bucket in np.array_split(np.arange(len(points)), MOST_POINTS // 2):
        ordered = sorted(bucket.tolist(), key=lambda n: points[n][1] if math.isfinite(points[n][1]) else -math.inf)
        kept += [points[n] for n in sorted({ordered[0], ordered[-1]})]
    return kept


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def _unbroken(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _path(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _bands(series: Series, *, place: _Place) -> tuple[str, ...]:
    if not series.band:
        return ()
    step = max(1, len(series.band) // MOST_POINTS)
    kept = series.band[::step]
    upper = [place(x, high) for x, _, high in kept]
    lower = [place(x, low) for x, low, _ in kept]
    return (_path([*upper, *reversed(lower)]),)


def _marks(series: Series, *, place: _Place) -> tuple[Mark, ...]:
    if len(series.points) > _MOST_MARKS:
        return ()
    return tuple(
        Mark(x=round(place(x, y)[0], 1), y=round(place(x, y)[1], 1), text=f"step {x:g}: {number_text(y)}")
        for x, y in series.points
        if math.isfinite(y)
    )


def _ticks(low: float, high: float, *, whole: bool) -> list[float]:
    """Four to six round numbers between the ends."""
    rough = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]
