"""The pool: the worker with the least to do, the dead get nothing, and successors know the engines."""

import asyncio
import contextlib

import pytest

from fourstroke.errors import ActorDiedError
from fourstroke.rollout import WorkerPool
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine
from fourstroke.types import RefusedGroup


class SlowWorker:
    """Answers each assignment after a second a group, with its own name; can be killed."""

    def __init__(self, name):
        self.name = name
        self.engines = None
        self.is_closed = False
        self._death = asyncio.Event()

    async def start(self):
        pass

    async def route(self, engines):
        self._check()
        self.engines = [engine.name for engine in engines]

    async def run(self, assignments, *, is_together):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(len(assignments)):
                await self._death.wait()
        self._check()
        return tuple(RefusedGroup(key=one.draw.key, reason=self.name, detail="") for one in assignments)

    async def check_health(self):
        self._check()
        return ()

    async def close(self):
        self.is_closed = True

    def kill(self):
        self._death.set()

    def _check(self):
        if self._death.is_set():
            raise ActorDiedError(f"{self.name} is gone")


class Scene:
    def __init__(self, *, count):
        self.made = {}
        self.pool = WorkerPool(self._make, count=count)

    def _make(self, name):
        self.made[name] = SlowWorker(name)
        return self.made[name]

    async def run(self, *assignments):
        return [refusal.reason for refusal in await self.pool.run(assignments, is_together=False)]


def _play(scenario, *, count=2):
    async def main():
        scene = Scene(count=count)
        await scene.pool.start()
        return await scenario(scene)

    return run_virtual(main())


def test_work_goes_to_the_worker_with_the_least_to_do(assign):
    async def scenario(scene):
        sizes = [3, 1, 1, 1, 1]
        return await asyncio.gather(*(scene.run(*(assign(index) for index in range(size))) for size in sizes))

    answers = _play(scenario)

    assert [answer[0] for answer in answers] == ["worker-0", "worker-1", "worker-1", "worker-1", "worker-0"]
    assert answers[0] == ["worker-0"] * 3


def test_what_is_done_counts_no_more(assign):
    async def scenario(scene):
        return [*await scene.run(assign()), *await scene.run(assign())]

    assert _play(scenario) == ["worker-0", "worker-0"]


def test_a_worker_that_died_gets_nothing_before_anybody_says_so(assign):
    async def scenario(scene):
        lost = asyncio.create_task(scene.run(assign()))
        await asyncio.sleep(0.5)
        scene.made["worker-0"].kill()
        with pytest.raises(ActorDiedError, match="worker-0 is gone"):
            await lost
        return await asyncio.gather(*(scene.run(assign(index)) for index in range(3)))

    assert _play(scenario) == [["worker-1"]] * 3


def test_without_a_worker_work_waits_for_the_successor(assign):
    async def scenario(scene):
        scene.made["worker-0"].kill()
        with pytest.raises(ActorDiedError):
            await scene.run(assign())
        waiting = asyncio.create_task(scene.run(assign()))
        await asyncio.sleep(60)
        assert not waiting.done()
        successor = await scene.pool.replace("worker-0")
        return successor.name, await waiting, scene.made["worker-0"].is_closed

    assert _play(scenario, count=1) == ("worker-1", ["worker-1"], True)


def test_a_route_reaches_the_workers_of_now_and_those_that_come_later():
    async def scenario(scene):
        engines = [FakeEngine(name="vllm-0"), FakeEngine(name="vllm-1")]
        await scene.pool.route(engines)
        scene.made["worker-1"].kill()
        await scene.pool.route(engines[1:])  # the dead one is passed over
        await scene.pool.replace("worker-1")
        return {name: worker.engines for name, worker in scene.made.items()}

    assert _play(scenario) == {
        "worker-0": ["vllm-1"],
        "worker-1": ["vllm-0", "vllm-1"],
        "worker-2": ["vllm-1"],
    }


def test_a_route_before_the_start_is_told_at_the_start():
    async def main():
        scene = Scene(count=1)
        await scene.pool.route([FakeEngine(name="vllm-0")])
        assert scene.made["worker-0"].engines is None
        await scene.pool.start()
        return scene.made["worker-0"].engines

    assert run_virtual(main()) == ["vllm-0"]


def test_a_forgotten_worker_is_ended_and_gets_nothing(assign):
    async def scenario(scene):
        await scene.pool.forget("worker-0")
        return await scene.run(assign()), scene.made["worker-0"].is_closed, [w.name for w in scene.pool.workers]

    assert _play(scenario) == (["worker-1"], True, ["worker-1"])


def test_close_ends_all_workers():
    async def scenario(scene):
        await scene.pool.close()
        await scene.pool.close()
        return [worker.is_closed for worker in scene.made.values()]

    assert _play(scenario) == [True, True]
