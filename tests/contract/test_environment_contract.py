"""What every taskset and environment must do; run on the fake and on the real ones."""

import asyncio
from collections.abc import Callable

import pytest

from fourstroke.environments import arithmetic, reasoning_gym
from fourstroke.errors import FourstrokeError
from fourstroke.testing.environment import FakeEnvironmentError, FakeTaskset
from fourstroke.types import Message, Task, Taskset

REPLY = Message(role="assistant", content="7")


def gym(name: str) -> Taskset:
    pytest.importorskip("reasoning_gym")
    return reasoning_gym(name=name, size=20)


TASKSETS: dict[str, Callable[[], Taskset]] = {
    "fake": lambda: FakeTaskset(num_train=4, num_held_out=4),
    "arithmetic": arithmetic,
    "reasoning_gym.chain_sum": lambda: gym("chain_sum"),
    "reasoning_gym.spell_backward": lambda: gym("spell_backward"),
}


@pytest.fixture(params=sorted(TASKSETS))
def taskset(request: pytest.FixtureRequest) -> Taskset:
    return TASKSETS[request.param]()


async def first_messages(taskset: Taskset, task: Task, seed: int) -> tuple[Message, ...]:
    environment = taskset.open(task, seed)
    observation = await environment.reset()
    await environment.close()
    assert not observation.is_final
    return observation.messages


def test_sides_are_disjoint_by_id_and_by_prompt(taskset: Taskset) -> None:
    assert taskset.train
    assert taskset.held_out
    assert not {task.id for task in taskset.train} & {task.id for task in taskset.held_out}
    assert not {task.prompt for task in taskset.train} & {task.prompt for task in taskset.held_out}


def test_making_it_again_gives_the_same_tasks(request: pytest.FixtureRequest, taskset: Taskset) -> None:
    again = TASKSETS[request.node.callspec.params["taskset"]]()

    assert list(again.train) == list(taskset.train)
    assert list(again.held_out) == list(taskset.held_out)


def test_same_seed_twice_gives_equal_first_observations(taskset: Taskset) -> None:
    async def run() -> None:
        task = taskset.train[0]
        assert await first_messages(taskset, task, 7) == await first_messages(taskset, task, 7)

    asyncio.run(run())


def test_different_tasks_look_different(taskset: Taskset) -> None:
    async def run() -> None:
        seen = {await first_messages(taskset, task, 7) for task in (*taskset.train, *taskset.held_out)}
        assert len(seen) == len(taskset.train) + len(taskset.held_out)

    asyncio.run(run())


def test_a_reply_ends_the_episode_and_a_step_after_the_end_raises(taskset: Taskset) -> None:
    async def run() -> None:
        environment = taskset.open(taskset.train[0], 7)
        await environment.reset()
        assert (await environment.step(REPLY)).is_final
        with pytest.raises((AssertionError, FourstrokeError)):
            await environment.step(REPLY)
        await environment.close()

    asyncio.run(run())


def test_single_use(taskset: Taskset) -> None:
    async def run() -> None:
        environment = taskset.open(taskset.train[0], 7)
        with pytest.raises((AssertionError, FourstrokeError)):
            await environment.step(REPLY)  # not yet reset
        await environment.reset()
        with pytest.raises((AssertionError, FourstrokeError)):
            await environment.reset()
        await environment.close()
        with pytest.raises((AssertionError, FourstrokeError)):
            await environment.step(REPLY)

    asyncio.run(run())


def test_two_interleaved_attempts_do_not_disturb_each_other(taskset: Taskset) -> None:
    async def run() -> None:
        alone = await first_messages(taskset, taskset.train[1], 8)
        left, right = taskset.open(taskset.train[0], 7), taskset.open(taskset.train[1], 8)
        await left.reset()
        assert (await left.step(REPLY)).is_final
        assert (await right.reset()).messages == alone
        await left.close()
        assert (await right.step(REPLY)).is_final
        await right.close()

    asyncio.run(run())


def test_closing_twice_or_unused_is_fine(taskset: Taskset) -> None:
    async def run() -> None:
        environment = taskset.open(taskset.train[0], 7)
        await environment.close()
        await environment.close()

    asyncio.run(run())


def test_the_fake_fails_and_counts_as_scripted() -> None:
    async def run() -> None:
        taskset = FakeTaskset(failing={1})
        environments = [taskset.open(taskset.train[0], 7) for _ in range(3)]
        results = await asyncio.gather(*(each.reset() for each in environments), return_exceptions=True)
        assert [isinstance(result, FakeEnvironmentError) for result in results] == [False, True, False]
        for environment in environments[:2]:
            await environment.close()
            await environment.close()
        assert (taskset.num_opened, taskset.num_closed) == (3, 2)

    asyncio.run(run())
