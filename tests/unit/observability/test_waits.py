"""Named waits: a deadline with a name, and a register of what goes on."""

import asyncio
import contextlib

import pytest

from fourstroke.errors import DeadlineError
from fourstroke.observability import Waits, describe_waits
from fourstroke.testing.clock import run_virtual
from fourstroke.types import Wait


def test_a_late_wait_says_what_it_waited_for():
    async def scenario():
        async with Waits("controller").within(600, "group e0000-i000012 to be sampled"):
            await asyncio.sleep(3600)

    with pytest.raises(DeadlineError, match=r"waited 600 s for group e0000-i000012 to be sampled; raise its key"):
        run_virtual(scenario())


def test_a_timeout_of_the_bodys_own_passes_unchanged():
    async def scenario():
        async with Waits("controller").within(600, "something"):
            raise TimeoutError("a socket's")

    with pytest.raises(TimeoutError, match="a socket's") as caught:
        run_virtual(scenario())
    assert not isinstance(caught.value, DeadlineError)


def test_in_time_nothing_happens():
    async def scenario():
        async with Waits("controller").within(600, "something"):
            await asyncio.sleep(599)
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == 599


def test_the_register_holds_what_goes_on_the_longest_first():
    async def scenario():
        waits = Waits("worker-0")
        with waits.noted("the first"):
            await asyncio.sleep(2)
            async with waits.within(10, "the second"):
                await asyncio.sleep(3)
                inside = waits.now()
            after = waits.now()
        return inside, after, waits.now()

    inside, after, end = run_virtual(scenario())

    first = Wait(part="worker-0", what="the first", waited_s=5.0, deadline_s=0.0)
    second = Wait(part="worker-0", what="the second", waited_s=3.0, deadline_s=10.0)
    assert (inside, after, end) == ((first, second), (first,), ())


def test_two_waits_that_read_alike_are_two():
    async def scenario():
        waits = Waits("worker-0")
        with waits.noted("a grader"), waits.noted("a grader"):
            together = len(waits.now())
            with waits.noted("a grader"):
                pass
            return together, len(waits.now())

    assert run_virtual(scenario()) == (2, 2)


def test_a_wait_that_fails_leaves_the_register():
    async def scenario():
        waits = Waits("worker-0")
        with contextlib.suppress(DeadlineError):
            async with waits.within(1, "a grader"):
                await asyncio.sleep(2)
        with contextlib.suppress(ValueError):
            async with waits.within(1, "a grader"):
                raise ValueError("its own")
        return waits.now()

    assert run_virtual(scenario()) == ()


def test_lines_for_a_person_have_the_longest_wait_first_and_its_deadline():
    waits = [
        Wait(part="batch", what="group e0-i1", waited_s=3.4, deadline_s=0.0),
        Wait(part="worker-0", what="a grader", waited_s=340.2, deadline_s=600.0),
    ]

    assert describe_waits(waits) == [
        "worker-0 waits for a grader: 340 s, at most 600 s",
        "batch waits for group e0-i1: 3 s",
    ]
