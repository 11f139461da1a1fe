"""The watch: who is dead or silent is found in time, replaced or given up as the policy says, and told of."""

import asyncio

import pytest

from fourstroke.config import load_config
from fourstroke.engines.fleet import Fleet
from fourstroke.engines.vllm import CHECKPOINT, REPLACEMENT
from fourstroke.errors import ActorDiedError, DeadlineError, EngineDiedError
from fourstroke.observability import EventKind
from fourstroke.orchestration.supervision import Supervisor
from fourstroke.orchestration.watch import Watch
from fourstroke.rollout import WorkerPool
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine
from fourstroke.testing.environment import FakeGrader, FakeTaskset
from fourstroke.testing.run import FakeWorker


class Scene:
    """Two engines and two workers under watch, for so many seconds."""

    def __init__(self, folder, **overrides):
        overrides = {"engine.count": 2, "rollout.num_workers": 2, "deadlines.answer_s": 5, **overrides}
        self.config = load_config({}, overrides=[f"{key}={value}" for key, value in overrides.items()])
        self.folder = folder
        self.engines, self.workers, self.events = {}, {}, []
        self.pool = WorkerPool(self._worker, count=self.config.rollout.num_workers)
        self.fleet = Fleet(self._engine, count=self.config.engine.count, is_fresh=True, on_routable=self.pool.route)
        self.watch = Watch(
            self.config,
            fleet=self.fleet,
            workers=self.pool,
            supervisor=Supervisor(self.config.supervision),
            tell=lambda kind, **fields: self.events.append((self.now(), kind, fields)),
        )

    def _engine(self, name, is_replacement):
        self.engines[name] = FakeEngine(name=name, held=REPLACEMENT if is_replacement else CHECKPOINT)
        return self.engines[name]

    def _worker(self, name):
        self.workers[name] = FakeWorker(
            name, config=self.config, taskset=FakeTaskset(), grader=FakeGrader(), payload_dir=self.folder
        )
        return self.workers[name]

    @staticmethod
    def now():
        return asyncio.get_running_loop().time()

    def faults(self):
        return [(time_s, fields["fault"], fields["part"]) for time_s, kind, fields in self.events if "fault" in fields]

    def successors(self):
        return [(f["part"], f["successor"]) for _, kind, f in self.events if kind is EventKind.PART_REPLACED]

    @property
    def serving(self):
        return [engine.name for engine in self.fleet.routable], [worker.name for worker in self.pool.workers]


def _play(folder, scenario, *, seconds=60, **overrides):
    """The scenario goes on beside the watch; what the watch raises is raised."""

    async def main():
        scene = Scene(folder, **overrides)
        await asyncio.gather(scene.pool.start(), scene.fleet.start())
        beside, watching = asyncio.create_task(scenario(scene)), asyncio.create_task(scene.watch.run())
        try:
            await asyncio.wait([watching], timeout=seconds)
            if watching.done():
                watching.result()
            watching.cancel()
            await beside
        finally:
            beside.cancel()
            await asyncio.gather(beside, watching, return_exceptions=True)
            await asyncio.gather(scene.fleet.close(), scene.pool.close())
        return scene

    return run_virtual(main())


async def _hang(*_arguments):
    await asyncio.Event().wait()


def test_nothing_is_told_while_all_live(tmp_path):
    async def scenario(scene):
        await asyncio.sleep(59)
        assert scene.serving == (["vllm-0", "vllm-1"], ["worker-0", "worker-1"])

    assert _play(tmp_path, scenario).events == []


def test_a_dead_engine_is_found_at_the_next_look_and_replaced(tmp_path):
    async def scenario(scene):
        await asyncio.sleep(3.5)
        scene.engines["vllm-0"].kill()
        await asyncio.sleep(5)
        assert scene.serving[0] == ["vllm-1", "vllm-2"]

    scene = _play(tmp_path, scenario)

    assert scene.faults() == [(4.0, "engine_died", "vllm-0")]
    assert "signal 9" in scene.events[0][2]["reason"]
    assert scene.successors() == [("vllm-0", "vllm-2")]


def test_a_dead_worker_is_found_and_replaced_and_its_successor_knows_the_engines(tmp_path):
    async def scenario(scene):
        await asyncio.sleep(3.5)
        scene.workers["worker-1"].kill()
        await asyncio.sleep(5)
        assert scene.serving[1] == ["worker-0", "worker-2"]
        assert set(scene.workers["worker-2"]._router._engines) == {"vllm-0", "vllm-1"}

    scene = _play(tmp_path, scenario)

    assert scene.faults() == [(4.0, "worker_died", "worker-1")]
    assert scene.successors() == [("worker-1", "worker-2")]


@pytest.mark.parametrize("part", ["vllm-0", "worker-0"])
def test_one_that_does_not_answer_is_replaced_after_its_deadline(tmp_path, part):
    async def scenario(scene):
        await asyncio.sleep(3.5)
        silent = {**scene.engines, **scene.workers}[part]
        silent.check_health = _hang
        await asyncio.sleep(2)
        assert [wait.what for wait in scene.watch.waits()] == [f"{part} to say that it lives"]

    scene = _play(tmp_path, scenario)

    assert [(time_s, name) for time_s, _, name in scene.faults()] == [(4.0 + 5.0, part)]
    assert f"waited 5 s for {part} to say that it lives" in scene.events[0][2]["reason"]
    assert [before for before, _ in scene.successors()] == [part]


def test_the_others_are_looked_at_while_one_is_being_replaced(tmp_path):
    async def scenario(scene):
        start = FakeEngine.start

        async def slow(engine):
            await asyncio.sleep(20)
            await start(engine)

        await asyncio.sleep(3.5)
        scene.fleet._make = lambda name, is_replacement: _slow(scene._engine(name, is_replacement), slow)
        scene.engines["vllm-0"].kill()
        await asyncio.sleep(4)
        scene.workers["worker-0"].kill()

    def _slow(engine, start):
        engine.start = lambda: start(engine)
        return engine

    scene = _play(tmp_path, scenario)

    assert scene.faults() == [(4.0, "engine_died", "vllm-0"), (8.0, "worker_died", "worker-0")]
    assert scene.successors() == [("worker-0", "worker-2"), ("vllm-0", "vllm-2")]


def test_where_nothing_may_be_replaced_the_run_goes_on_with_fewer_and_stops_with_the_last(tmp_path):
    async def scenario(scene):
        await asyncio.sleep(3.5)
        scene.engines["vllm-0"].kill()
        scene.workers["worker-0"].kill()
        await asyncio.sleep(10)
        assert scene.serving == (["vllm-1"], ["worker-1"])
        scene.engines["vllm-1"].kill()

    with pytest.raises(EngineDiedError, match="vllm-1: process 4711 ended with signal 9"):
        _play(tmp_path, scenario, **{"supervision.max_replacements": 0})


def test_the_last_worker_that_may_not_be_replaced_stops_the_run(tmp_path):
    async def scenario(scene):
        await asyncio.sleep(3.5)
        scene.workers["worker-0"].kill()

    with pytest.raises(ActorDiedError, match="worker-0"):
        _play(tmp_path, scenario, **{"supervision.max_replacements": 0, "rollout.num_workers": 1})


def test_a_successor_that_does_not_start_stops_the_run_with_its_name(tmp_path):
    async def scenario(scene):
        await asyncio.sleep(3.5)
        plain = scene.fleet._make

        def broken(name, is_replacement):
            engine = plain(name, is_replacement)
            engine.start = _hang
            return engine

        scene.fleet._make = broken
        scene.engines["vllm-0"].kill()

    with pytest.raises(DeadlineError, match="waited 30 s for the successor of vllm-0 to start"):
        _play(tmp_path, scenario, **{"deadlines.start_s": 30})


def test_deaths_far_apart_are_all_replaced(tmp_path):
    async def scenario(scene):
        for death in range(6):
            scene.watch.step = 10 * death
            scene.engines[f"vllm-{death}"].kill()
            await asyncio.sleep(5)

    scene = _play(tmp_path, scenario, **{"engine.count": 1, "supervision.max_replacements": 1})

    assert len(scene.successors()) == 6


def test_what_workers_wait_for_is_shown(tmp_path):
    async def scenario(scene):
        with scene.workers["worker-1"]._waits.noted("a grader"):
            await asyncio.sleep(3.5)
            return [(wait.part, wait.what) for wait in scene.watch.waits()]

    async def checked(scene):
        assert await scenario(scene) == [("worker-1", "a grader")]

    _play(tmp_path, checked)


def test_parts_that_die_together_are_no_others_to_each_other(tmp_path):
    async def kill_both(scene):
        await asyncio.sleep(3.5)
        for worker in scene.workers.values():
            worker.kill()

    with pytest.raises(ActorDiedError, match="worker-1"):
        _play(tmp_path, kill_both, **{"supervision.max_replacements": 0})


def test_engines_that_die_together_are_no_others_to_each_other(tmp_path):
    async def kill_both(scene):
        await asyncio.sleep(3.5)
        for engine in scene.engines.values():
            engine.kill()

    with pytest.raises(EngineDiedError, match="vllm-1"):
        _play(tmp_path, kill_both, **{"supervision.max_replacements": 0})
