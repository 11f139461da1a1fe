"""S30: finished groups beyond a batch wait for the next one; none is thrown away (THUDM/slime#2238)."""

import asyncio

import pytest

from fourstroke.orchestration.buffer import GroupBuffer
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.episodes import make_group, make_record


@pytest.mark.parametrize("window", [1, 4, 12])
def test_three_batches_of_ten_finished_groups(window):
    records = [make_record(make_group([1.0, 0.0], index=index)) for index in range(1, 13)]

    async def scenario():
        buffer = GroupBuffer(window=window)
        for record in records[:10]:
            buffer.expect(record.id)
            await buffer.put(record)
        first, second = await buffer.take(4), await buffer.take(4)
        third = asyncio.create_task(buffer.take(4))
        await asyncio.sleep(3600)
        waits = not third.done()
        for record in records[10:]:  # produced when asked for
            buffer.expect(record.id)
            await buffer.put(record)
        return [[record.draw.index for record in batch] for batch in (first, second, await third)], waits

    # The buggy system's first call took all ten, returned four and lost six.
    assert run_virtual(scenario()) == ([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], True)
