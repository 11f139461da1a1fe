"""What is raised when several things fail, and how work ends when what goes on beside it fails."""

import asyncio

import pytest

from fourstroke.orchestration.faults import first_cause, work_under_watch
from fourstroke.testing.clock import run_virtual


async def _fail_after(seconds, error):
    await asyncio.sleep(seconds)
    raise error


def test_of_groups_within_groups_the_first_error_is_raised():
    group = BaseExceptionGroup("", [ExceptionGroup("", [ValueError("first")]), KeyError("second")])

    with pytest.raises(ValueError, match="first") as caught, first_cause():
        raise group
    assert caught.value.__cause__ is None


def test_a_single_error_passes_unchanged():
    with pytest.raises(ValueError, match="alone"), first_cause():
        raise ValueError("alone")


def test_what_goes_on_beside_ends_with_the_work():
    ended = []

    async def beside():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(asyncio.get_running_loop().time())

    run_virtual(work_under_watch(asyncio.sleep(5), beside(), beside()))

    assert ended == [5, 5]


def test_the_work_ends_when_something_beside_it_fails():
    ended = []

    async def work():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(asyncio.get_running_loop().time())

    with pytest.raises(ValueError, match="beside"):
        run_virtual(work_under_watch(work(), _fail_after(5, ValueError("beside"))))
    assert ended == [5]


def test_of_two_that_fail_together_the_one_beside_names_the_cause():
    with pytest.raises(ValueError, match="the engine died"):
        run_virtual(
            work_under_watch(_fail_after(5, KeyError("no answer")), _fail_after(5, ValueError("the engine died")))
        )


def test_the_works_own_error_is_raised():
    with pytest.raises(KeyError, match="its own"):
        run_virtual(work_under_watch(_fail_after(1, KeyError("its own")), asyncio.sleep(3600)))


def test_cancelling_the_caller_ends_both():
    ended = []

    async def forever(name):
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(name)

    async def scenario():
        caller = asyncio.create_task(work_under_watch(forever("work"), forever("beside")))
        await asyncio.sleep(1)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        return caller.cancelled()

    assert run_virtual(scenario())
    assert sorted(ended) == ["beside", "work"]
