"""Exact and numeric verifiers: what counts as the answer, in hostile replies too, in linear time."""

import asyncio
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fourstroke.errors import DataError
from fourstroke.rewards import exact, numeric
from fourstroke.types import Episode, Message, Scored, StopReason, Task, Timings


def grade(grader: Any, reply: str, answer: str) -> Scored:
    task = Task(id="t", prompt=(Message(role="user", content="?"),), answer=answer)
    episode = Episode(
        id="g.0",
        group="g",
        member=0,
        task_id="t",
        attempt=0,
        spans=(),
        stop=StopReason.FINISHED,
        messages=(Message(role="assistant", content=reply),),
        timings=Timings(generate_s=0.0),
    )
    verdict = asyncio.run(grader.grade(task, episode))
    assert isinstance(verdict, Scored)
    return verdict


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("7", "7"),
        ("3 + 4 = 7.", "7"),
        ("The answer is **7**!", "7"),
        ("first 12, no, 7", "7"),
        ("1,250", "1250"),
        ("It costs $1,234,567.50 in all.", "1234567.5"),
        ("1250", "1,250"),
        ("\u22125", "-5"),
        ("-0", "0"),
        ("007", "7"),
        ("7.000", "7"),
        (".5", "0.5"),
        ("The answer is ...5", "5"),
        ("12-5=7", "7"),
        ("10-3", "3"),  # a minus between two terms is no sign
        ("(2)-7", "7"),
        ("model-7", "7"),
        ("x = -7", "-7"),
        ("+7", "7"),
        ("7e2", "700"),
        ("1,2,7", "7"),
        ("1,2345", "2345"),
        ("12,345,6789", "6789"),
        ("0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
        ("1e-999999999", "1e-999999999"),
    ],
)
def test_numeric_accepts(reply: str, answer: str) -> None:
    verdict = grade(numeric(), reply, answer)

    assert (verdict.score, verdict.components, verdict.reason) == (1.0, {"numeric": 1.0}, "equal")


@pytest.mark.parametrize(
    ("reply", "answer", "reason"),
    [
        ("", "7", "no number"),
        ("seven", "7", "no number"),
        ("\u0667 \uff17 \u00b2", "7", "no number"),  # digits, but not ASCII
        ("7 or 8", "7", "not equal: 8"),
        ("-7", "7", "not equal: -7"),
        ("7.0000000000000001", "7", "not equal: 7.0000000000000001"),  # equal as floats
        ("0.30000000000000004", "0.3", "not equal: 0.30000000000000004"),
        ("10000000000000001", "10000000000000000", "not equal: 10000000000000001"),
        ("9" * 1_000_000, "7", "number too long"),
        ("7" + "0" * 5000, "7", "number too long"),
        ("1e999999999", "7", "not equal: 1e999999999"),
        ("1e99999999999999999999999", "7", "number out of range"),
        ("7" * 100, "7", "not equal: " + "7" * 40),
    ],
)
def test_numeric_refuses_with_a_reason(reply: str, answer: str, reason: str) -> None:
    verdict = grade(numeric(), reply, answer)

    assert (verdict.score, verdict.components, verdict.reason) == (0.0, {"numeric": 0.0}, reason)


@given(st.integers(-(10**30), 10**30), st.integers(0, 12), st.text(st.characters(exclude_categories=["N"]), max_size=5))
@example(-1250, 0, "a")
def test_numeric_finds_any_decimal_whatever_stands_before(value: int, shift: int, before: str) -> None:
    exact_value = Fraction(value, 10**shift)
    digits = f"{abs(value):0{shift + 1}d}"
    whole, fraction = (digits[:-shift], digits[-shift:]) if shift else (digits, "")
    text = f"{int(whole):,}" + (f".{fraction}" if fraction else "")
    reply = f"{before} {'-' if value < 0 else ''}{text}."

    assert grade(numeric(), reply, f"{value}e-{shift}").score == 1.0
    assert grade(numeric(), reply, f"{value + 1}e-{shift}").score == 0.0
    assert exact_value == Fraction(f"{'-' if value < 0 else ''}{text.replace(',', '')}")


@pytest.mark.parametrize("unit", ["9", "1,", "1,234", ",111", "1e", "-", "1.", "(", "1 ", "\u0301\u0323", " ", "-1e-"])
def test_ten_megabytes_are_graded_in_linear_time(unit: str) -> None:
    reply = unit * (10_000_000 // len(unit))

    assert grade(numeric(), reply, "7").score == 0.0  # quadratic work would outlast the suite's time limit
    assert grade(exact(), reply, "7").score == 0.0


@pytest.mark.parametrize("answer", ["", "seven", "1/2", "7 apples", "nan", "inf"])
def test_numeric_raises_where_the_answer_is_no_number(answer: str) -> None:
    with pytest.raises(DataError, match="task t"):
        grade(numeric(), "7", answer)


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("Oslo", "Oslo", 1.0),
        ("  New \n York ", "New York", 1.0),
        ("cafe\u0301", "caf\u00e9", 1.0),
        ("\u1f82", "\u03b1\u0313\u0300\u0345", 1.0),  # four code points join into one
        ("\u03b1\u0313\u0300\u0345", "\u1f82", 1.0),
        ("oslo", "Oslo", 0.0),
        ("Oslo.", "Oslo", 0.0),
        ("It is Oslo", "Oslo", 0.0),
        ("Oslo Oslo", "Oslo", 0.0),
        ("", "Oslo", 0.0),
        ("\u202eOslo", "Oslo", 0.0),
    ],
)
def test_exact_compares_the_whole_reply(reply: str, answer: str, score: float) -> None:
    assert grade(exact(), reply, answer).score == score


def test_exact_ignores_case_only_when_asked() -> None:
    assert grade(exact(ignore_case=True), "STRASSE", "stra\u00dfe").score == 1.0
    assert grade(exact(), "OSLO", "oslo").score == 0.0
    assert exact().name != exact(ignore_case=True).name


def test_exact_raises_where_the_answer_is_empty() -> None:
    with pytest.raises(DataError, match="task t"):
        grade(exact(), "", " ")


def test_the_last_assistant_message_is_the_reply() -> None:
    task = Task(id="t", prompt=(), answer="7")
    messages = tuple(Message(role=role, content=text) for role, text in (("assistant", "7"), ("user", "8")))
    episode = Episode(
        id="g.0",
        group="g",
        member=0,
        task_id="t",
        attempt=0,
        spans=(),
        stop=StopReason.FINISHED,
        messages=messages,
        timings=Timings(generate_s=0.0),
    )

    assert asyncio.run(numeric().grade(task, episode)).score == 1.0
