"""Named waits."""

import asyncio

import pytest

from fourstroke.errors import DeadlineError
from fourstroke.orchestration.waits import within
from fourstroke.testing.clock import run_virtual


def test_a_late_wait_says_what_it_waited_for():
    async def scenario():
        async with within(600, "group e0000-i000012 to be sampled"):
            await asyncio.sleep(3600)

    with pytest.raises(DeadlineError, match=r"waited 600 s for group e0000-i000012 to be sampled; raise its key"):
        run_virtual(scenario())


def test_a_timeout_of_the_bodys_own_passes_unchanged():
    async def scenario():
        async with within(600, "something"):
            raise TimeoutError("a socket's")

    with pytest.raises(TimeoutError, match="a socket's") as caught:
        run_virtual(scenario())
    assert not isinstance(caught.value, DeadlineError)


def test_in_time_nothing_happens():
    async def scenario():
        async with within(600, "something"):
            await asyncio.sleep(599)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == 599
