"""Episodes to rows: masks by position and origin, forks that count once, non-finite numbers refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.errors import DataError
from fourstroke.testing.episodes import make_episode, prompt_span, sampled_span
from fourstroke.tokens import episode_rows
from fourstroke.types import Column, MaskReason


def test_a_single_turn_gives_one_row_with_the_reply_trained_on():
    episode = make_episode([prompt_span([11, 12]), sampled_span([17, 23, 2], [-0.5, -1.0, -2.0], parent=0, version=4)])

    (row,) = episode_rows(episode)

    assert row[Column.IDS].tolist() == [11, 12, 17, 23, 2]
    assert row[Column.LOSS_MASK].tolist() == [False, False, True, True, True]
    assert row[Column.BEHAVIOUR_LOGPROBS].tolist() == [0.0, 0.0, -0.5, -1.0, -2.0]
    assert row[Column.VERSIONS].tolist() == [-1, -1, 4, 4, 4]
    prompt, sampled = MaskReason.PROMPT.ordinal, MaskReason.SAMPLED.ordinal
    assert row[Column.MASK_REASON].tolist() == [prompt, prompt, sampled, sampled, sampled]


def test_a_fork_gives_two_rows_and_the_shared_reply_counts_once():
    episode = make_episode(
        [
            prompt_span([1]),
            sampled_span([5, 6], [-1.0, -1.0], parent=0),
            sampled_span([7], [-1.0], parent=1),
            sampled_span([8, 9], [-1.0, -1.0], parent=1),
        ]
    )

    first, second = episode_rows(episode)

    assert first[Column.IDS].tolist() == [1, 5, 6, 7]
    assert second[Column.IDS].tolist() == [1, 5, 6, 8, 9]
    assert second[Column.LOSS_MASK].tolist() == [False, False, False, True, True]
    assert second[Column.MASK_REASON].tolist()[1:3] == [MaskReason.SHARED.ordinal] * 2


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_sampled_token_without_a_finite_logprob_is_refused_by_name(value):
    episode = make_episode([prompt_span([1]), sampled_span([5, 6], [-1.0, value], parent=0)])

    with pytest.raises(DataError, match=rf"row {episode.id}/0 .* at token 2"):
        episode_rows(episode)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_each_sampled_token_is_trained_on_once_however_the_episode_forks(lengths, random):
    spans = [prompt_span([0])]
    for length in lengths:
        parent = random.randrange(len(spans))
        spans.append(sampled_span(list(range(length)), [-1.0] * length, parent=parent))

    rows = episode_rows(make_episode(spans))

    assert sum(row.num_loss_tokens for row in rows) == sum(lengths)
    assert all(np.isfinite(row[Column.BEHAVIOUR_LOGPROBS]).all() for row in rows)
