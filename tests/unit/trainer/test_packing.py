"""Plans and packed rows: every row once, none too large, few micro-batches; each token under its own path alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fourstroke.errors import DataError
from fourstroke.tokens import num_shared
from fourstroke.trainer.packing import assemble, plan, shared_among

# Few ids and short rows, so that rows share beginnings, are equal, or are beginnings of each other.
rows_of_ids = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9).map(lambda ids: np.array(ids, dtype=np.int32)),
    min_size=1,
    max_size=12,
)


def shared_of(rows: list[np.ndarray]) -> list[int]:
    return [0, *(num_shared(rows[at - 1], rows[at]) for at in range(1, len(rows)))]


# --- plan -------------------------------------------------------------------------------------------------------------


@given(rows_of_ids, st.integers(9, 40))
def test_every_row_once_and_every_micro_batch_fits_when_packed(rows: list[np.ndarray], room: int) -> None:
    microbatches = plan([len(row) for row in rows], shared=shared_of(rows), max_tokens=room)

    assert sorted(row for microbatch in microbatches for row in microbatch.rows) == list(range(len(rows)))
    for microbatch in microbatches:
        assert list(microbatch.rows) == sorted(microbatch.rows)
        assert 0 < len(assemble([rows[row] for row in microbatch.rows]).ids_T) <= room


@given(st.lists(st.integers(1, 40), max_size=50), st.integers(40, 300))
@example([20, 20, 20], 40)
def test_no_two_micro_batches_would_fit_into_one(lengths: list[int], room: int) -> None:
    loads = sorted(sum(lengths[row] for row in microbatch.rows) for microbatch in plan(lengths, max_tokens=room))
    assert len(loads) < 2 or loads[0] + loads[1] > room


@pytest.mark.parametrize("seed", range(5))
def test_few_micro_batches_for_rows_of_at_most_a_quarter(seed: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(5.5, 0.8, 3000).astype(int).clip(1, 1024).tolist()
    assert len(plan(lengths, max_tokens=4096)) <= 1.03 * math.ceil(sum(lengths) / 4096)


def test_by_hand() -> None:
    # 9 fills a bin; 4, 3 and 2 make the second: the emptiest takes each next one.
    assert [part.rows for part in plan([3, 9, 4, 2], max_tokens=10)] == [(1,), (0, 2, 3)]


def test_work_is_spread_evenly() -> None:
    # Best fit would give 6 + 4, 2 and, of five rows, two micro-batches; evenly they hold 6 and 6.
    assert [part.rows for part in plan([6, 2, 2, 2], max_tokens=10)] == [(0,), (1, 2, 3)]


def test_a_group_stays_together_and_its_prompt_counts_once() -> None:
    # 8 + 2 + 2 and 8 + 2 = 10: 22 tokens where plain rows would have 50.
    groups = plan([8, 10, 10, 8, 10], shared=[0, 8, 8, 0, 8], max_tokens=12)
    assert [part.rows for part in groups] == [(0, 1, 2), (3, 4)]


def test_a_group_that_is_too_large_is_cut_and_pays_for_its_prompt_again() -> None:
    assert [part.rows for part in plan([8, 10, 10], shared=[0, 8, 8], max_tokens=10)] == [(0, 1), (2,)]


def test_nothing_to_plan() -> None:
    assert plan([], max_tokens=10) == ()


def test_a_row_that_cannot_fit_is_named() -> None:
    with pytest.raises(DataError, match=r"^row 1 has 11 tokens, .*trainer.microbatch_tokens = 10"):
        plan([3, 11], max_tokens=10)


@given(rows_of_ids, st.data())
def test_what_kept_rows_share_is_never_overrated(rows: list[np.ndarray], data: st.DataObject) -> None:
    kept = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1))))
    found = shared_among(shared_of(rows), kept)

    assert len(found) == len(kept)
    for index, shared in enumerate(found):
        assert shared <= (num_shared(rows[kept[index - 1]], rows[kept[index]]) if index else 0)
    if kept == list(range(len(rows))):
        assert found == shared_of(rows)


# --- assemble ---------------------------------------------------------------------------------------------------------


@given(rows_of_ids)
def test_each_row_is_found_and_each_beginning_is_there_once(rows: list[np.ndarray]) -> None:
    packed = assemble(rows)

    for row, slots in zip(rows, packed.slots, strict=True):
        assert packed.ids_T[slots].tolist() == row.tolist()
        assert packed.positions_T[slots].tolist() == list(range(len(row)))
    beginnings = {tuple(row[:length].tolist()) for row in rows for length in range(1, len(row) + 1)}
    assert len(packed.ids_T) == len(packed.positions_T) == len(beginnings)


@given(rows_of_ids)
def test_segments_cover_all_and_lead_to_each_token(rows: list[np.ndarray]) -> None:
    packed = assemble(rows)

    assert [segment.start for segment in packed.segments[1:]] == [segment.stop for segment in packed.segments[:-1]]
    assert (packed.segments[0].start, packed.segments[-1].stop) == (0, len(packed.ids_T))
    for slots in packed.slots:
        path = []
        number = next(i for i, each in enumerate(packed.segments) if each.start <= slots[-1] < each.stop)
        while number >= 0:
            segment = packed.segments[number]
            assert segment.parent < number
            path = [*range(segment.start, segment.stop), *path]
            number = segment.parent
        assert path[: len(slots)] == slots.tolist()


def test_a_tree_by_hand() -> None:
    rows = [np.array(row) for row in ([7, 8], [5, 6, 9], [5, 6, 4, 4], [5, 6])]
    packed = assemble(rows)

    assert packed.ids_T.tolist() == [5, 6, 4, 4, 9, 7, 8]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert [(each.start, each.stop, each.parent) for each in packed.segments] == [
        (0, 2, -1),
        (2, 4, 0),
        (4, 5, 0),
        (5, 7, -1),
    ]
    assert [slots.tolist() for slots in packed.slots] == [[5, 6], [0, 1, 4], [0, 1, 2, 3], [0, 1]]
