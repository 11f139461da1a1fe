"""The picture of a run: reward, reply length, entropy and mismatch over steps, as one PNG.

Reads records and writes one file. Matplotlib is imported where it is used, since only the end of a run needs it, and
without pyplot, so that no global state is touched.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fourstroke.types import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_PX, _HEIGHT_PX, _DPI = 1200, 800, 100
_BLUE, _ORANGE, _GREEN, _PURPLE = "#1f5fa8", "#d9730d", "#2a8a57", "#7a4fa3"
_INK, _FAINT = "#2b2f36", "#d9dde3"


def smoothed(values: Sequence[float], *, half_width: int) -> list[float]:
    """Centred moving average over up to ``2 * half_width + 1`` values; at an end, over those that there are.

    Example:
        >>> smoothed([0.0, 3.0, 0.0, 3.0], half_width=1)
        [1.5, 1.0, 2.0, 1.5]
    """
    windows = (values[max(0, centre - half_width) : centre + half_width + 1] for centre in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _series(records: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, at the steps that have a finite one."""
    points = [(r["step"], r[name]) for r in records if name in r and math.isfinite(r[name])]
    return [step for step, _ in points], [value for _, value in points]


def _curve(axes: Axes, records: Sequence[Mapping[str, float]], name: str, *, color: str) -> list[float]:
    """Draw a metric, faint points and a smoothed line, and return its values."""
    steps, values = _series(records, name)
    if not values:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=_INK)
        return values
    axes.plot(steps, values, "o", color=color, alpha=0.3, markersize=4.5, markeredgewidth=0)
    axes.plot(steps, smoothed(values, half_width=max(1, len(values) // 12)), color=color, linewidth=2.2)
    return values


def _style(axes: Axes, title: str, *, unit: str) -> None:
    axes.set_title(f"{title} ({unit})", loc="left", fontsize=13, color=_INK, pad=10)
    axes.set_xlabel("training step", fontsize=11, color=_INK)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=_INK, labelsize=10.5, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)


def _reward(
    axes: Axes, records: Sequence[Mapping[str, float]], *, evaluations: Sequence[tuple[float, Estimate]]
) -> None:
    values = _curve(axes, records, "reward/grade/score_mean", color=_BLUE)
    for step, estimate in evaluations:
        error = [[estimate.mean - estimate.low], [estimate.high - estimate.mean]]
        axes.errorbar(step, estimate.mean, yerr=error, fmt="D", color=_ORANGE, markersize=7, capsize=5, linewidth=1.8)
    lowest = min([*values, *(estimate.low for _, estimate in evaluations)], default=0.0)
    if lowest >= 0:
        axes.set_ylim(bottom=0)
    _style(axes, "Reward", unit="mean score")
    if evaluations:
        from matplotlib.lines import Line2D

        means = " \N{RIGHTWARDS ARROW} ".join(f"{estimate.mean:.2f}" for _, estimate in evaluations)
        handles = [
            Line2D([], [], color=_BLUE, linewidth=2.2, label="training"),
            Line2D([], [], color=_ORANGE, linewidth=0, marker="D", label=f"held out {means}, 95 % interval"),
        ]
        axes.legend(handles=handles, loc="best", edgecolor="none", framealpha=0.9, fontsize=10.5, labelcolor=_INK)


def _length(axes: Axes, records: Sequence[Mapping[str, float]]) -> None:
    lengths = _curve(axes, records, "rollout/episode/length_mean", color=_GREEN)
    axes.set_ylim(0, 1.15 * max(lengths, default=1.0))
    _style(axes, "Reply length", unit="tokens")
    share = axes.twinx()
    steps, values = _series(records, "rollout/episode/truncated_fraction")
    share.fill_between(steps, [100 * value for value in values], color=_ORANGE, alpha=0.16, linewidth=0)
    share.set_ylim(0, 115)
    share.set_yticks([0, 25, 50, 75, 100])
    share.tick_params(colors=_ORANGE, labelsize=10.5, length=0)
    share.set_ylabel("replies cut at the limit (%)", fontsize=11, color=_ORANGE)
    for spine in share.spines.values():
        spine.set_visible(False)
    # The length is drawn over the share, not under it.
    axes.set_zorder(share.get_zorder() + 1)
    axes.patch.set_visible(False)


def _mismatch(axes: Axes, records: Sequence[Mapping[str, float]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    values = _curve(axes, records, "train/mismatch/mean_abs_log_ratio", color=_BLUE)
    positive = [value for value in values if value > 0]
    if positive:
        axes.set_yscale("log")
        # At least a decade, so that noise does not fill the panel.
        axes.set_ylim(min(positive) / 3, max(positive) * 3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    _style(axes, "Mismatch of trainer and engine", unit="mean |log ratio|, nats")


def draw_curves(
    records: Sequence[Mapping[str, float]],
    path: Path,
    *,
    before: Estimate | None = None,
    after: Estimate | None = None,
    title: str = "",
) -> None:
    """Write the four-panel picture of a run, 1200 x 800 pixels.

    Args:
        records: Lines of ``metrics.jsonl`` in step order; ``step`` counts from 1. May be empty.
        path: Where the PNG goes; an old one is replaced.
        before: Held-out evaluation before training, drawn with its 95 % interval.
        after: The same after training.
        title: A line above the panels.

    Raises:
        OSError: The file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     draw_curves([{"step": 1, "train/loss/entropy": 1.5}], Path(folder, "curves.png"))
        ...     Path(folder, "curves.png").read_bytes()[1:4]
        b'PNG'
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12)
    figure = Figure(figsize=(_WIDTH_PX / _DPI, _HEIGHT_PX / _DPI), dpi=_DPI, layout=layout, facecolor="white")
    panels = figure.subplots(2, 2)
    last_step = max((record["step"] for record in records), default=1.0)
    # The evaluations stand just outside of the curve's ends.
    margin = max(0.5, 0.04 * last_step)
    evaluations = [(x, e) for x, e in ((1 - margin, before), (last_step + margin, after)) if e is not None]
    _reward(panels[0, 0], records, evaluations=evaluations)
    _length(panels[0, 1], records)
    _curve(panels[1, 0], records, "train/loss/entropy", color=_PURPLE)
    panels[1, 0].set_ylim(bottom=0)
    _style(panels[1, 0], "Entropy", unit="nats per token")
    _mismatch(panels[1, 1], records)
    for axes in panels.flat:
        axes.set_xlim(1 - 1.8 * margin, last_step + 1.8 * margin)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    if title:
        figure.suptitle(title, fontsize=15, color=_INK, x=0.012, ha="left")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    path.write_bytes(image.getvalue())
