"""The fleet: weights land on all engines that serve, the dead serve no more, and successors are brought up to date."""

import asyncio

import pytest

from fourstroke.engines.fleet import Fleet
from fourstroke.engines.vllm import CHECKPOINT, REPLACEMENT
from fourstroke.errors import EngineDiedError, PublicationError
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine
from fourstroke.types import Publication, WeightVersion

START_S, LOAD_S = 60.0, 1.0


class SlowEngine(FakeEngine):
    """Takes its time to start and to load; ``dies_loading`` ends it in the middle of that."""

    dies_loading = False

    async def start(self):
        await asyncio.sleep(START_S)
        await super().start()

    async def update_weights(self, publication):
        await asyncio.sleep(LOAD_S)
        if self.dies_loading:
            self.kill()
        return await super().update_weights(publication)


class Scene:
    """A fleet of slow engines, all engines ever made, and what the fleet told of them."""

    def __init__(self, *, count=2, is_fresh=True, engine=SlowEngine):
        self.made, self.told, self.engine = {}, [], engine
        self.fleet = Fleet(self._make, count=count, is_fresh=is_fresh, on_routable=self._on_routable)

    def _make(self, name, is_replacement):
        self.made[name] = self.engine(name=name, held=REPLACEMENT if is_replacement else CHECKPOINT)
        return self.made[name]

    async def _on_routable(self, engines):
        self.told.append([engine.name for engine in engines])

    @property
    def routable(self):
        return [engine.name for engine in self.fleet.routable]

    async def publish(self, number, *, incarnation=0):
        async def write():
            return _publication(number, incarnation=incarnation)

        return await self.fleet.publish(write)


def _publication(number, *, incarnation=0):
    version = WeightVersion(incarnation=incarnation, number=number, digest=f"{incarnation}-{number}")
    return Publication(version=version, path="", size_bytes=0, tensors=())


def _play(scenario, **named):
    async def main():
        scene = Scene(**named)
        await scene.fleet.start()
        await scenario(scene)
        return scene

    return run_virtual(main())


def test_a_fresh_fleet_serves_version_0_at_once():
    async def scenario(scene):
        assert scene.fleet.version == CHECKPOINT

    scene = _play(scenario)
    assert scene.told == [["vllm-0", "vllm-1"]]


def test_a_resumed_fleet_serves_nothing_before_its_weights_landed():
    async def scenario(scene):
        assert scene.routable == []
        await scene.publish(300, incarnation=1)
        assert scene.fleet.version.number == 300

    scene = _play(scenario, is_fresh=False)
    assert scene.told == [["vllm-0", "vllm-1"]]


def test_weights_land_on_all_engines_side_by_side():
    async def scenario(scene):
        before_s = asyncio.get_running_loop().time()
        await scene.publish(1)
        assert asyncio.get_running_loop().time() - before_s == LOAD_S
        assert scene.fleet.version.number == 1

    scene = _play(scenario, count=3)
    assert {engine.version.number for engine in scene.made.values()} == {1}
    assert scene.routable == ["vllm-0", "vllm-1", "vllm-2"]


def test_an_engine_that_dies_during_a_publication_serves_no_more_and_holds_up_nobody():
    async def scenario(scene):
        scene.made["vllm-0"].dies_loading = True
        await scene.publish(1)

    scene = _play(scenario)
    assert scene.routable == ["vllm-1"]
    assert scene.told[-1] == ["vllm-1"]


def test_where_all_die_a_publication_waits_for_a_successor_which_takes_these_weights():
    async def scenario(scene):
        for engine in scene.made.values():
            engine.dies_loading = True
        publishing = asyncio.create_task(scene.publish(1))
        await asyncio.sleep(LOAD_S + 1)
        assert not publishing.done()
        assert scene.routable == []
        await scene.fleet.replace("vllm-0")
        assert (await publishing).number == 1

    scene = _play(scenario)
    assert scene.routable == ["vllm-2"]
    assert scene.made["vllm-2"].version.number == 1


def test_a_successor_serves_only_once_it_holds_the_present_weights():
    async def scenario(scene):
        await scene.publish(1)
        scene.made["vllm-0"].kill()
        replacing = asyncio.create_task(scene.fleet.replace("vllm-0"))
        await asyncio.sleep(START_S + LOAD_S / 2)
        assert scene.routable == ["vllm-1"]
        successor = await replacing
        assert (successor.name, successor.version.number) == ("vllm-2", 1)

    scene = _play(scenario)
    assert scene.routable == ["vllm-1", "vllm-2"]
    assert scene.told == [["vllm-0", "vllm-1"], ["vllm-0", "vllm-1"], ["vllm-1"], ["vllm-1", "vllm-2"]]


@pytest.mark.parametrize("num_published", [1, 2])
def test_weights_that_land_while_a_successor_starts_reach_it_too(num_published):
    async def scenario(scene):
        await scene.publish(1)
        replacing = asyncio.create_task(scene.fleet.replace("vllm-0"))
        await asyncio.sleep(1)
        for number in range(num_published):
            await scene.publish(2 + number)
        assert (await replacing).version.number == 1 + num_published

    _play(scenario)


def test_a_publication_waits_for_a_successor_that_is_catching_up():
    """The buffer that the successor reads from must not be written meanwhile."""

    async def scenario(scene):
        await scene.publish(1)
        written = []

        async def write():
            written.append(asyncio.get_running_loop().time())
            return _publication(2)

        began_s = asyncio.get_running_loop().time()
        replacing = asyncio.create_task(scene.fleet.replace("vllm-0"))
        await asyncio.sleep(START_S + LOAD_S / 2)
        await scene.fleet.publish(write)
        assert written == [began_s + START_S + LOAD_S]
        assert (await replacing).version.number == 2

    scene = _play(scenario)
    assert scene.routable == ["vllm-1", "vllm-2"]


def test_an_engine_that_is_replaced_at_version_0_serves_at_once():
    async def scenario(scene):
        scene.made["vllm-0"].kill()
        assert (await scene.fleet.replace("vllm-0")).version == CHECKPOINT

    scene = _play(scenario)
    assert scene.routable == ["vllm-1", "vllm-2"]


@pytest.mark.parametrize("num_published", [1, 2])
def test_weights_that_land_while_an_engine_is_replaced_at_version_0_reach_its_successor(num_published):
    async def scenario(scene):
        replacing = asyncio.create_task(scene.fleet.replace("vllm-0"))
        await asyncio.sleep(1)
        for number in range(num_published):
            await scene.publish(1 + number)
        successor = await replacing
        assert successor.version.number == num_published
        assert scene.routable == ["vllm-1", successor.name]

    _play(scenario)


def test_a_successor_that_dies_while_it_catches_up_is_told():
    async def scenario(scene):
        await scene.publish(1)
        replacing = asyncio.create_task(scene.fleet.replace("vllm-0"))
        await asyncio.sleep(1)
        scene.made["vllm-2"].dies_loading = True
        with pytest.raises(EngineDiedError, match="vllm-2 died while it took weights"):
            await replacing

    scene = _play(scenario)
    assert scene.routable == ["vllm-1"]


def test_an_engine_that_holds_something_else_is_refused():
    class Stubborn(SlowEngine):
        """Says that it took the weights, and did not."""

        async def update_weights(self, publication):
            return self.version

    async def scenario(scene):
        with pytest.raises(PublicationError, match=r"was sent version 0\.1-0-1 and holds 0\.0-checkpoi"):
            await scene.publish(1)

    _play(scenario, count=1, engine=Stubborn)


def test_a_forgotten_engine_is_ended_and_serves_no_more():
    async def scenario(scene):
        await scene.fleet.forget("vllm-0")
        assert scene.told[-1] == ["vllm-1"]
        with pytest.raises(EngineDiedError, match="was closed"):
            await scene.made["vllm-0"].check_health()
        await scene.publish(1)

    scene = _play(scenario)
    assert scene.routable == ["vllm-1"]
    assert [engine.name for engine in scene.fleet.engines] == ["vllm-1"]


def test_a_publication_waits_where_the_last_engine_was_forgotten():
    """Its weights must not count as landed while nobody serves them."""

    async def scenario(scene):
        await scene.fleet.forget("vllm-0")
        publishing = asyncio.create_task(scene.publish(1))
        await asyncio.sleep(60)
        assert not publishing.done()
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)

    assert _play(scenario, count=1).told[-1] == []


def test_close_ends_all_engines_and_may_be_called_twice():
    async def scenario(scene):
        await scene.fleet.close()
        await scene.fleet.close()
        for engine in scene.made.values():
            with pytest.raises(EngineDiedError):
                await engine.check_health()

    _play(scenario)
