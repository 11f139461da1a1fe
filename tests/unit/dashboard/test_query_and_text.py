"""What readers ask and what models write, both checked before they go further."""

import math

import numpy as np
import pytest

from fourstroke.dashboard.query import Query
from fourstroke.dashboard.token_view import Colouring, probability_class, token_views
from fourstroke.dashboard.visible_text import text_part, visible
from fourstroke.errors import ConfigError
from fourstroke.testing.episodes import make_episode, prompt_span, sampled_span


@pytest.mark.parametrize("value", ["x", "1.5", "nan", "inf", "1e30", "--1"])
def test_what_is_no_whole_number_is_refused_in_one_sentence(value):
    with pytest.raises(ConfigError, match="step = ") as caught:
        Query({"step": value}).whole("step")

    assert "\n" not in str(caught.value)


def test_what_is_no_number_or_no_choice_is_refused():
    with pytest.raises(ConfigError, match="min_score = 'nan' is no number"):
        Query({"min_score": "nan"}).number("min_score")
    with pytest.raises(ConfigError, match="stop = 'never' is unknown; choose one of finished, length"):
        Query({"stop": "never"}).one_of("stop", ["finished", "length"])


def test_an_empty_value_asks_nothing():
    query = Query({"step": "", "stop": "", "min_score": ""})

    assert (query.whole("step"), query.number("min_score"), query.one_of("stop", ["a"]), query.given) == (
        None,
        None,
        "",
        {},
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x00b", "a\\x00b"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("\ud83d", "\\ud83d"),
        ("a\nb", "a\nb"),
        ("\ufeffx\u200b", "\\ufeffx\\u200b"),
        ("\u05d0\u05d1 \u4f60", "\u05d0\u05d1 \u4f60"),
        ("\u2028", "\\u2028"),
    ],
)
def test_what_is_invisible_is_shown_and_what_is_text_is_left(text, shown):
    assert visible(text) == shown


def test_the_parts_of_a_text_are_the_text():
    text = "".join(chr(97 + n % 26) for n in range(1003))

    parts = [text_part(text, number=n, size=100) for n in range(1, 12)]

    assert "".join(part.text for part in parts) == text
    assert {part.num_parts for part in parts} == {11}


@pytest.mark.parametrize("number", [-3, 0, 99])
def test_a_part_that_is_not_there_is_the_nearest(number):
    assert text_part("", number=number, size=10).text == ""
    assert text_part("abcde", number=number, size=2).text in ("ab", "e")


@pytest.mark.parametrize(
    ("probability", "number"), [(1.0, 0), (0.91, 0), (0.89, 1), (0.5001, 1), (0.3, 2), (0.1, 3), (0.02, 4), (0.001, 5)]
)
def test_likelier_tokens_have_lower_classes(probability, number):
    assert probability_class(math.log(probability)) == number


def _views(**chosen):
    sampled = sampled_span([7, 8, 9], [-0.05, -0.7, np.nan], parent=0, version=4)
    episode = make_episode([prompt_span([5, 6]), sampled])
    asked = {"first": 0, "count": 10, "tokenizer": None, "advantage": None, "colouring": Colouring.LOGPROB, **chosen}
    return token_views(episode, **asked)


def test_each_token_says_all_that_was_recorded_of_it():
    views = _views()

    assert [(view.position, view.id, view.piece) for view in views[:3]] == [(0, 5, "5 "), (1, 6, "6 "), (2, 7, "7 ")]
    assert [view.colour for view in views] == ["unsampled", "unsampled", "p0", "p2", "p5"]
    assert [view.logprob for view in views] == ["-", "-", "-0.0500", "-0.7000", "nan"]
    assert [view.version for view in views] == ["-", "-", "4", "4", "4"]
    assert views[0].title == "0: id 5, prompt"
    assert "log-probability -0.0500 (probability 0.9512), version 4, sampled, fake-0" in views[2].title


def test_a_page_of_tokens_goes_over_the_edge_of_a_span():
    assert [view.id for view in _views(first=1, count=2)] == [6, 7]
    assert [view.id for view in _views(first=3, count=9)] == [8, 9]


@pytest.mark.parametrize(
    ("advantage", "colour"), [(0.5, "a-plus"), (-0.5, "a-minus"), (0.0, "a-zero"), (None, "unsampled")]
)
def test_the_advantage_colours_what_was_trained_on(advantage, colour):
    views = _views(advantage=advantage, colouring=Colouring.ADVANTAGE)

    assert [view.colour for view in views] == ["unsampled", "unsampled", colour, colour, colour]
