"""Lines for a file, a live view for a terminal, and nothing hostile on either."""

from __future__ import annotations

import io
import os
import pty
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fourstroke.observability import LiveReporter, PlainReporter, duration, make_reporter, printable

RECORD = {
    "step": 3,
    "reward/grade/score_mean": 0.25,
    "rollout/episode/length_mean": 11.34,
    "rollout/generate/tokens_per_second": 430.4,
    "train/mismatch/mean_abs_log_ratio": 0.00213,
}
HOSTILE = "a\x1b[2J\r\u202eb[red]c[/red]\x07"


def test_plain_prints_one_line_a_step() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.step(3, total=40, record=RECORD, eta_s=3725.0)
    expected = "step 3/40  reward 0.250  length 11.3  tokens/s 430  mismatch 0.0021  ETA 1:02:05\n"
    assert stream.getvalue() == expected


def test_plain_reports_a_long_phase_at_its_quarters() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.phase("evaluate", total=200)
    for done in range(1, 201):
        reporter.advance(done)
    lines = stream.getvalue().splitlines()
    assert lines == [f"evaluate ({done}/200)" for done in (0, 50, 100, 150, 200)]


def test_plain_summary_lines_up() -> None:
    stream = io.StringIO()
    PlainReporter(stream).summary([("before", "0.08"), ("run folder", "runs/x")])
    assert stream.getvalue() == "before      0.08\nrun folder  runs/x\n"


def test_live_shows_bar_table_notes_and_summary() -> None:
    stream = io.StringIO()
    reporter = LiveReporter(Console(file=stream, force_terminal=True, width=100, color_system=None))
    reporter.phase("train", total=40)
    reporter.step(3, total=40, record=RECORD, eta_s=61.0)
    reporter.note("group e0000-i000003 dropped")
    reporter.summary([("after", "0.82 [0.78, 0.86]")])
    text = stream.getvalue()
    for part in ("train", "3/40", "ETA 1:01", "0.250", "11.3", "430", "0.0021", "i000003 dropped", "0.82 [0.78, 0.86]"):
        assert part in text, part
    assert text.endswith("\n")


def test_live_gives_the_terminal_back_and_is_quiet_after() -> None:
    stream = io.StringIO()
    reporter = LiveReporter(Console(file=stream, force_terminal=True, width=100))
    reporter.phase("train", total=4)
    reporter.close()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1
    length = len(stream.getvalue())
    reporter.close()
    reporter.advance(2)
    assert len(stream.getvalue()) == length


def test_live_keeps_the_latest_steps_only() -> None:
    stream = io.StringIO()
    reporter = LiveReporter(Console(file=stream, force_terminal=True, width=100, height=60, color_system=None))
    reporter.phase("train", total=40)
    for step in range(1, 21):
        reporter.step(step, total=40, record=RECORD, eta_s=None)
    stream.truncate(0)
    reporter.advance(20)
    shown = re.findall(r"(\d+) +0\.250", stream.getvalue())
    assert shown == [str(step) for step in range(13, 21)]
    reporter.close()


@pytest.mark.parametrize(("width", "shown"), [(100, 5), (50, 5), (44, 4), (20, 2)])
def test_live_leaves_out_columns_that_do_not_fit_whole(width: int, shown: int) -> None:
    stream = io.StringIO()
    reporter = LiveReporter(Console(file=stream, force_terminal=True, width=width, color_system=None))
    reporter.step(3, total=40, record=RECORD, eta_s=61.0)
    reporter.close()
    cells = ["3", "0.250", "11.3", "430", "0.0021"]
    last = re.findall(r"^ +3 .*$", stream.getvalue(), re.MULTILINE)[-1]
    assert re.findall(r"[\d.]+", last)[:5] == cells[:shown]


@pytest.mark.parametrize("is_live", [False, True])
def test_text_of_a_model_neither_steers_the_terminal_nor_is_markup(is_live: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    reporter = LiveReporter(console) if is_live else PlainReporter(stream)
    reporter.note(HOSTILE)
    reporter.summary([(HOSTILE, HOSTILE)])
    text = stream.getvalue()
    assert text.count(r"a\x1b[2J\r\u202eb[red]c[/red]\x07") == 3
    for raw in ("\x1b[2J", "\u202e", "\x07"):
        assert raw not in text


def test_choice_follows_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_reporter(io.StringIO()), PlainReporter)
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as stream:
        live = make_reporter(stream)
        assert isinstance(live, LiveReporter)
        live.close()
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(make_reporter(stream), PlainReporter)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0:00"), (59.6, "1:00"), (3599.0, "59:59"), (3599.7, "1:00:00"), (90000.0, "25:00:00")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.text())
def test_printable_leaves_no_control_character(text: str) -> None:
    shown = printable(text)
    assert not [char for char in shown if unicodedata.category(char)[0] == "C" and unicodedata.category(char) != "Co"]
    assert len(shown.splitlines()) <= 1


def test_printable_of_what_broken_utf8_became() -> None:
    shown = printable(b"a\xff\xfe\x80".decode(errors="surrogateescape") + "\ud800")

    assert shown == r"a\udcff\udcfe\udc80\ud800"
    shown.encode()


def test_printable_cuts_ten_megabytes_to_a_page() -> None:
    shown = printable("\u202e" * 10_000_000)

    assert shown.startswith(r"\u202e\u202e")
    assert shown.endswith("… (9,990,000 more characters)")
    assert len(shown) < 100_000


@given(st.text(), st.integers(0, 5))
def test_printable_of_a_cut_text_is_that_of_its_beginning(text: str, most: int) -> None:
    more = f"… ({len(text) - most:,} more characters)" if len(text) > most else ""

    assert printable(text, most=most) == printable(text[:most]) + more


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_printable_leaves_ordinary_text_alone(text: str) -> None:
    assert printable(text) == text
