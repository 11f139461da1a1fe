"""The buffer: oldest admitted first, each group once, nothing thrown away."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.orchestration.buffer import GroupBuffer
from fourstroke.testing.clock import NothingWillHappenError, run_virtual
from fourstroke.testing.episodes import make_group


def _groups(count):
    return [make_group([1.0, 0.0], index=index) for index in range(count)]


@given(st.permutations(range(8)), st.sets(st.integers(0, 7), max_size=4))
def test_groups_come_out_in_admission_order_whatever_order_they_finish_in(order, dropped):
    groups = _groups(8)

    async def scenario():
        buffer = GroupBuffer()
        for group in groups:
            buffer.expect(group.id)
        for index in order:
            if index in dropped:
                await buffer.forget(groups[index].id)
            else:
                await buffer.put(groups[index])
        taken = [group.id for _ in range(8 - len(dropped)) for group in await buffer.take(1)]
        return taken, buffer.num_expected

    taken, num_left = run_virtual(scenario())

    assert taken == [group.id for index, group in enumerate(groups) if index not in dropped]
    assert num_left == 0


def test_surplus_groups_wait_for_the_next_step():
    groups = _groups(10)

    async def scenario():
        buffer = GroupBuffer()
        for group in groups:
            buffer.expect(group.id)
            await buffer.put(group)
        first, second = await buffer.take(4), await buffer.take(4)
        third = asyncio.create_task(buffer.take(4))
        await asyncio.sleep(1)
        assert not third.done()
        for group in (make_group([1.0], index=index) for index in (10, 11)):
            buffer.expect(group.id)
            await buffer.put(group)
        return [[group.draw.index for group in part] for part in (first, second, await third)]

    assert run_virtual(scenario()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_wait_that_nothing_can_end_is_seen_under_virtual_time():
    async def scenario():
        await GroupBuffer().take(1)

    with pytest.raises(NothingWillHappenError):
        run_virtual(scenario())
