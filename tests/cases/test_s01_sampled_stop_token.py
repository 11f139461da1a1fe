"""S01: the sampled stop token is an action, even where its id is also the padding's."""

import numpy as np

from fourstroke.testing.episodes import make_episode, prompt_span, sampled_span
from fourstroke.tokens import episode_rows
from fourstroke.types import Column

STOP = PAD = 2


def _reinforce_sum(row, advantage):
    """- sum of advantage * log-probability over the trained tokens, in float64."""
    return -advantage * float(row[Column.BEHAVIOUR_LOGPROBS].astype(np.float64)[row[Column.LOSS_MASK]].sum())


def test_the_stop_token_is_trained_on_and_padding_is_not():
    spans = [prompt_span([9]), sampled_span([17, 23, STOP], [-0.5, -1.0, -2.0], parent=0)]
    (row,) = episode_rows(make_episode(spans))

    reply_ids = np.full(5, PAD)
    reply_mask = np.zeros(5, dtype=bool)
    reply_ids[:3], reply_mask[:3] = row[Column.IDS][1:], row[Column.LOSS_MASK][1:]

    assert reply_ids.tolist() == [17, 23, 2, 2, 2]
    assert reply_mask.tolist() == [True, True, True, False, False]
    assert _reinforce_sum(row, advantage=1.0) == 3.5  # 0.5 + 1.0 + 2.0


def test_a_reply_that_was_cut_gets_no_stop_token():
    spans = [prompt_span([9]), sampled_span([17, 23, 24, 25, 26], [-1.0] * 5, parent=0)]
    (row,) = episode_rows(make_episode(spans))

    assert row[Column.IDS].tolist() == [9, 17, 23, 24, 25, 26]
    assert row.num_loss_tokens == 5
