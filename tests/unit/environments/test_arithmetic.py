"""The arithmetic taskset: every problem once, right answers, at least 200 held out, bad arguments refused."""

import re
from typing import Any

import pytest

from fourstroke.environments import arithmetic
from fourstroke.errors import ConfigError
from fourstroke.types import Task


def parts(task: Task) -> tuple[int, str, int]:
    match = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", task.prompt[0].content)
    assert match
    return int(match[1]), match[2], int(match[3])


def test_defaults_hold_every_problem_once_and_at_least_200_out() -> None:
    taskset = arithmetic()

    expected = {(a, "+", b) for a in range(1, 26) for b in range(1, 10)}
    expected |= {(a, "-", b) for a in range(2, 27) for b in range(1, min(a - 1, 9) + 1)}
    found = [parts(task) for task in (*taskset.train, *taskset.held_out)]
    assert len(expected) == 414
    assert sorted(found) == sorted(expected)
    assert len(taskset.held_out) >= 200
    assert not {task.id for task in taskset.train} & {task.id for task in taskset.held_out}


def test_answers_are_right() -> None:
    taskset = arithmetic(operations=["add", "subtract", "multiply"], max_left=12)

    for task in (*taskset.train, *taskset.held_out):
        a, sign, b = parts(task)
        assert int(task.answer) == {"+": a + b, "-": a - b, "*": a * b}[sign]
        assert int(task.answer) > 0


def test_seed_changes_the_order_and_not_the_split() -> None:
    first, again, second = arithmetic(seed=1), arithmetic(seed=1), arithmetic(seed=2)

    assert first.train == again.train
    assert first.train != second.train
    assert {task.id for task in first.held_out} == {task.id for task in second.held_out}
    assert {parts(task)[1] for task in first.train[:20]} == {"+", "-"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"operations": ["divide"]}, "operations"),
        ({"operations": []}, "operations"),
        ({"operations": "add"}, "operations"),
        ({"max_left": 0}, "max_left = 0"),
        ({"max_right": 2.5}, "max_right = 2.5"),
        ({"max_right": True}, "max_right = True"),
        ({"held_out_fraction": 2}, "held_out_fraction = 2"),
        ({"held_out_fraction": 0.0}, "hold out"),
        ({"held_out_fraction": 1.0}, "train on"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        arithmetic(**arguments)

    assert text in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_system_message_stands_before_each_problem() -> None:
    taskset = arithmetic(system="Answer briefly.")
    for task in (*taskset.train, *taskset.held_out):
        assert [message.role for message in task.prompt] == ["system", "user"]
        assert task.prompt[0].content == "Answer briefly."
    assert len(taskset.held_out) >= 200
    assert not {task.id for task in taskset.train} & {task.id for task in taskset.held_out}
