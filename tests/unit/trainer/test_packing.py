"""Micro-batch plans: every row once, none too large, none wasted."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.errors import DataError
from fourstroke.trainer.packing import plan

lengths_and_room = st.lists(st.integers(1, 40), max_size=50).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max([1, *lengths]), 300))
)


@given(lengths_and_room)
def test_every_row_once_and_every_micro_batch_fits(drawn: tuple[list[int], int]) -> None:
    lengths, room = drawn
    microbatches = plan(lengths, max_tokens=room)

    assert sorted(row for microbatch in microbatches for row in microbatch.rows) == list(range(len(lengths)))
    for microbatch in microbatches:
        assert microbatch.rows
        assert len(microbatch.rows) * max(lengths[row] for row in microbatch.rows) <= room


@given(lengths_and_room)
def test_no_micro_batch_could_take_the_next_row(drawn: tuple[list[int], int]) -> None:
    lengths, room = drawn
    microbatches = plan(lengths, max_tokens=room)
    for this, after in pairwise(microbatches):
        assert (len(this.rows) + 1) * lengths[after.rows[0]] > room


def test_by_hand() -> None:
    # Sorted: 2 (row 3), 3 (row 0), 4 (row 2), 9 (row 1); 2 rows of 3 fill 6, a third of 4 would need 12.
    assert [microbatch.rows for microbatch in plan([3, 9, 4, 2], max_tokens=10)] == [(3, 0), (2,), (1,)]


def test_a_row_that_cannot_fit_is_named() -> None:
    with pytest.raises(DataError, match=r"^row 1 has 11 tokens, .*trainer.microbatch_tokens = 10"):
        plan([3, 11], max_tokens=10)
