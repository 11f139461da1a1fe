"""The split is a pure function of a task's content, and its sides share no prompt."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourstroke.environments import is_held_out, split, task_of
from fourstroke.errors import ConfigError
from fourstroke.types import Message, Task


def make_task(text: str, answer: str = "7") -> Task:
    return task_of((Message(role="user", content=text),), answer=answer)


tasks_of_any_text = st.lists(st.builds(make_task, st.text(max_size=6), st.text(max_size=2)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(tasks_of_any_text, st.floats(0, 1))
def test_sides_share_no_prompt_and_lose_no_task(tasks: list[Task], fraction: float) -> None:
    train, held_out = split(tasks, fraction=fraction)

    normal = [{unicodedata.normalize("NFC", task.prompt[0].content) for task in side} for side in (train, held_out)]
    assert not normal[0] & normal[1]
    ids = [task.id for task in (*train, *held_out)]
    assert len(ids) == len(set(ids))
    assert set(ids) == {task.id for task in tasks}


@settings(max_examples=100, deadline=None)
@given(tasks_of_any_text, st.floats(0, 1), st.randoms(use_true_random=False))
def test_a_task_keeps_its_side_whatever_stands_beside_it(tasks: list[Task], fraction: float, random: object) -> None:
    whole = {task.id for task in split(tasks, fraction=fraction)[1]}
    shuffled = list(tasks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    half = shuffled[: len(shuffled) // 2]

    assert {task.id for task in split(half, fraction=fraction)[1]} == whole & {task.id for task in half}


@given(st.text(max_size=9), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_only_adds_to_the_held_out_side(text: str, first: float, second: float) -> None:
    prompt = (Message(role="user", content=text),)
    small, large = sorted((first, second))

    assert is_held_out(prompt, fraction=small) <= is_held_out(prompt, fraction=large)


def test_fraction_is_met_about() -> None:
    _, held_out = split((make_task(str(number)) for number in range(4000)), fraction=0.25)

    assert abs(len(held_out) - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5  # five standard deviations


def test_equal_content_is_one_task_and_two_spellings_of_a_character_are_equal() -> None:
    composed, decomposed = make_task("caf\u00e9"), make_task("cafe\u0301")

    assert composed.id == decomposed.id
    assert len(split([composed, decomposed], fraction=0.0)[0]) == 1


def test_id_depends_on_answer_role_and_where_one_text_ends() -> None:
    contents = [
        ((Message(role="user", content="ab"),), "c"),
        ((Message(role="user", content="a"),), "bc"),
        ((Message(role="system", content="ab"),), "c"),
        ((Message(role="user", content="a"), Message(role="user", content="b")), "c"),
    ]

    assert len({task_of(prompt, answer=answer).id for prompt, answer in contents}) == len(contents)


def test_one_prompt_with_two_answers_stays_on_one_side() -> None:
    for number in range(50):
        train, held_out = split([make_task(str(number), "1"), make_task(str(number), "2")], fraction=0.5)
        assert sorted((len(train), len(held_out))) == [0, 2]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_that_is_no_share_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        split([], fraction=fraction)
