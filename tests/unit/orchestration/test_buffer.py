"""The buffer: the window's order, each group once, nothing thrown away."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.orchestration.buffer import GroupBuffer
from fourstroke.testing.clock import NothingWillHappenError, run_virtual
from fourstroke.testing.episodes import make_group, make_record

NUM_GROUPS = 8


def _records(count):
    return [make_record(make_group([1.0, 0.0], index=index)) for index in range(count)]


def _takeable(untaken, finished, window):
    """By the definition: the oldest finished group among those numbered below h + W."""
    in_window = [number for number in untaken if number < untaken[0] + window and number in finished]
    return in_window[0] if in_window else None


@given(
    window=st.integers(1, NUM_GROUPS),
    order=st.permutations(range(NUM_GROUPS)),
    dropped=st.sets(st.integers(0, NUM_GROUPS - 1)),
    num_taken_after=st.lists(st.integers(0, 3), min_size=NUM_GROUPS, max_size=NUM_GROUPS),
)
def test_groups_come_out_by_the_window_whatever_order_they_finish_in(window, order, dropped, num_taken_after):
    """After each finish or drop, up to so many groups are taken; the rest waits."""
    records = _records(NUM_GROUPS)

    async def scenario():
        buffer, taken = GroupBuffer(window=window), []
        for record in records:
            buffer.expect(record.id)
        for index, num_taken in zip(order, num_taken_after, strict=True):
            await (buffer.forget(records[index].id) if index in dropped else buffer.put(records[index]))
            for _ in range(num_taken):
                try:
                    async with asyncio.timeout(1):
                        taken += [record.draw.index for record in await buffer.take(1)]
                except TimeoutError:
                    break
        left = [record.draw.index for record in await buffer.take(NUM_GROUPS - len(dropped) - len(taken))]
        return taken, left

    untaken, finished, expected = list(range(NUM_GROUPS)), set(), []
    for index, num_taken in zip(order, num_taken_after, strict=True):
        if index in dropped:
            untaken.remove(index)
        else:
            finished.add(index)
        for _ in range(num_taken):
            number = _takeable(untaken, finished, window) if untaken else None
            if number is None:
                break
            untaken.remove(number)
            expected.append(number)

    assert run_virtual(scenario()) == (expected, untaken)


def test_what_is_taken_together_is_in_admission_order():
    records = _records(4)

    async def scenario():
        buffer = GroupBuffer(window=4)
        for record in records:
            buffer.expect(record.id)
        taking = asyncio.create_task(buffer.take(4))
        for index in (3, 1, 0, 2):
            await buffer.put(records[index])
            await asyncio.sleep(1)  # taken before the next is there
        return [record.draw.index for record in await taking]

    assert run_virtual(scenario()) == [0, 1, 2, 3]


def test_an_unfinished_group_holds_back_what_lies_behind_the_window():
    records = _records(3)

    async def scenario():
        buffer = GroupBuffer(window=2)
        for record in records:
            buffer.expect(record.id)
        await buffer.put(records[2])
        taking = asyncio.create_task(buffer.take(1))
        await asyncio.sleep(1)
        held_back = not taking.done()
        await buffer.forget(records[0].id)  # the window moves on
        return held_back, [record.draw.index for record in await taking]

    assert run_virtual(scenario()) == (True, [2])


def test_a_take_that_is_cancelled_while_it_waits_leaves_everything():
    records = _records(2)

    async def scenario():
        buffer = GroupBuffer(window=1)
        for record in records:
            buffer.expect(record.id)
        waiting = asyncio.create_task(buffer.take(1))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for record in records:
            await buffer.put(record)
        return [record.draw.index for record in await buffer.take(2)]

    assert run_virtual(scenario()) == [0, 1]


def test_what_nobody_expects_is_a_programmers_mistake():
    (record,) = _records(1)

    async def scenario():
        buffer = GroupBuffer(window=1)
        with pytest.raises(KeyError):
            await buffer.put(record)
        buffer.expect(record.id)
        with pytest.raises(AssertionError):
            buffer.expect(record.id)
        await buffer.put(record)
        with pytest.raises(AssertionError):
            await buffer.put(record)
        with pytest.raises(AssertionError):
            await buffer.forget(record.id)

    run_virtual(scenario())


def test_a_wait_that_nothing_can_end_is_seen_under_virtual_time():
    async def scenario():
        await GroupBuffer(window=1).take(1)

    with pytest.raises(NothingWillHappenError):
        run_virtual(scenario())
