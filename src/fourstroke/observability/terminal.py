"""What a person sees of a run: one calm live view on a terminal, one line a step elsewhere.

Takes plain values and decides nothing. Text may come from a model and is hostile: it is shown through
:func:`printable` alone, never as markup and never with a control character in it.
"""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Control, format (bidirectional overrides among them), surrogate, unassigned, line and paragraph separators.
_UNPRINTABLE = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}

# Columns of the view: heading, metric, format.
_COLUMNS = (
    ("reward", "reward/grade/score_mean", ".3f"),
    ("length", "rollout/episode/length_mean", ".1f"),
    ("tokens/s", "rollout/generate/tokens_per_second", ".0f"),
    ("mismatch", "train/mismatch/mean_abs_log_ratio", ".2g"),
)

_NUM_STEPS_SHOWN = 8
_COLUMN_WIDTH = 8
# A text that a person reads on a terminal is shorter; what a model wrote may have any length.
_MOST_CHARACTERS = 10_000


def printable(text: str, *, most: int = _MOST_CHARACTERS) -> str:
    r"""The text on one line, with every character that could steer a terminal written as an escape.

    Control characters, marks that turn the writing's direction, halves of surrogate pairs (what broken UTF-8 becomes)
    and line ends are such. A long text is cut before it is looked at, so that 10 MB cost no more than a page.

    Args:
        text: Any text.
        most: Characters of it to show; how many more there are is said at the end.

    Example:
        >>> print(printable("red \x1b[31m and\nback \u202e"))
        red \x1b[31m and\nback \u202e
        >>> printable("ab" * 1000, most=3)
        'aba… (1,997 more characters)'
    """
    shown, num_more = text[:most], len(text) - most
    if not shown.isprintable():
        shown = "".join(
            char.encode("unicode_escape").decode() if unicodedata.category(char) in _UNPRINTABLE else char
            for char in shown
        )
    return f"{shown}… ({num_more:,} more characters)" if num_more > 0 else shown


def duration(seconds: float | None) -> str:
    """A duration as ``m:ss`` or ``h:mm:ss``; "-" where it is not known.

    Example:
        >>> duration(61.4), duration(3600), duration(None)
        ('1:01', '1:00:00', '-')
    """
    if seconds is None:
        return "-"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


class Reporter(Protocol):
    """Where a run tells a person of its progress."""

    def phase(self, name: str, *, total: int) -> None:
        """A new phase begins ("evaluate", "train"), of ``total`` parts."""
        ...

    def advance(self, done: int) -> None:
        """``done`` parts of the phase are finished."""
        ...

    def step(self, step: int, *, total: int, record: Mapping[str, float], eta_s: float | None) -> None:
        """Training step ``step`` (counted from 1) of ``total`` is finished; advances the phase."""
        ...

    def note(self, text: str) -> None:
        """Something that a person should read once."""
        ...

    def summary(self, lines: Sequence[tuple[str, str]]) -> None:
        """The end of the run, as pairs of name and value. Ends a live view."""
        ...

    def close(self) -> None:
        """Give the terminal back. May be called twice."""
        ...


def make_reporter(stream: TextIO) -> Reporter:
    """The live view if ``stream`` is a terminal that can move its cursor, else lines."""
    console = Console(file=stream, highlight=False)
    if stream.isatty() and not console.is_dumb_terminal:
        return LiveReporter(console)
    return PlainReporter(stream)


def _cells(record: Mapping[str, float]) -> list[str]:
    return [format(record[name], spec) if name in record else "-" for _, name, spec in _COLUMNS]


class PlainReporter:
    """One line a step; a phase of many parts is reported at its quarters.

    Example:
        >>> import sys
        >>> reporter = PlainReporter(sys.stdout)
        >>> reporter.step(3, total=40, record={"reward/grade/score_mean": 0.25}, eta_s=61)
        step 3/40  reward 0.250  length -  tokens/s -  mismatch -  ETA 1:01
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._name, self._total, self._quarter = "", 0, 0

    def phase(self, name: str, *, total: int) -> None:
        """See :class:`Reporter`."""
        self._name, self._total, self._quarter = name, total, 0
        self._write(f"{printable(name)} (0/{total})")

    def advance(self, done: int) -> None:
        """See :class:`Reporter`."""
        quarter = 4 * done // self._total if self._total else 4
        if quarter > self._quarter:
            self._quarter = quarter
            self._write(f"{printable(self._name)} ({done}/{self._total})")

    def step(self, step: int, *, total: int, record: Mapping[str, float], eta_s: float | None) -> None:
        """See :class:`Reporter`."""
        cells = [f"{heading} {cell}" for (heading, *_), cell in zip(_COLUMNS, _cells(record), strict=True)]
        self._write("  ".join([f"step {step}/{total}", *cells, f"ETA {duration(eta_s)}"]))

    def note(self, text: str) -> None:
        """See :class:`Reporter`."""
        self._write(printable(text))

    def summary(self, lines: Sequence[tuple[str, str]]) -> None:
        """See :class:`Reporter`."""
        width = max((len(name) for name, _ in lines), default=0)
        for name, value in lines:
            self._write(f"{printable(name):<{width}}  {printable(value)}")

    def close(self) -> None:
        """See :class:`Reporter`."""

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveReporter:
    """A bar for the phase over a table of the latest steps, redrawn when something changed and not otherwise.

    Example:
        >>> import io
        >>> reporter = LiveReporter(Console(file=io.StringIO(), force_terminal=True))
        >>> reporter.phase("train", total=40)
        >>> reporter.close()
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name, self._total, self._done = "", 0, 0
        self._eta_s: float | None = None
        self._rows: deque[list[str]] = deque(maxlen=_NUM_STEPS_SHOWN)
        # Redrawn by our calls alone: a refresh thread would wake for nothing.
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def phase(self, name: str, *, total: int) -> None:
        """See :class:`Reporter`."""
        self._name, self._total, self._done, self._eta_s = name, total, 0, None
        self._redraw()

    def advance(self, done: int) -> None:
        """See :class:`Reporter`."""
        self._done = done
        self._redraw()

    def step(self, step: int, *, total: int, record: Mapping[str, float], eta_s: float | None) -> None:
        """See :class:`Reporter`."""
        self._rows.append([str(step), *_cells(record)])
        self._done, self._total, self._eta_s = step, total, eta_s
        self._redraw()

    def note(self, text: str) -> None:
        """See :class:`Reporter`."""
        self._console.print(Text(printable(text), style="dim"))

    def summary(self, lines: Sequence[tuple[str, str]]) -> None:
        """See :class:`Reporter`."""
        self.close()
        grid = Table.grid(padding=(0, 2))
        for name, value in lines:
            grid.add_row(Text(printable(name), style="dim"), Text(printable(value)))
        self._console.print(grid)

    def close(self) -> None:
        """See :class:`Reporter`."""
        self._live.stop()

    def _redraw(self) -> None:
        if self._live.is_started:
            self._live.update(self._view(), refresh=True)

    def _view(self) -> RenderableType:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(printable(self._name), style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._done, width=40),
            Text(f"{self._done}/{self._total}"),
            Text(f"ETA {duration(self._eta_s)}" if self._eta_s is not None else "", style="dim"),
        )
        if not self._rows:
            return bar
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        # A column that does not fit whole is left out: half a number is another number.
        num_fitting = max(2, self._console.width // (_COLUMN_WIDTH + 2))
        for heading in ("step", *(heading for heading, *_ in _COLUMNS))[:num_fitting]:
            table.add_column(heading, justify="right", min_width=_COLUMN_WIDTH)
        for position, row in enumerate(self._rows):
            table.add_row(*row[:num_fitting], style="" if position == len(self._rows) - 1 else "dim")
        return Group(bar, Text(""), table)
