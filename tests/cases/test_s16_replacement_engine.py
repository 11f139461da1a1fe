"""S16: a replacement engine gets no traffic before it has the current weights (radixark/miles#1724)."""

import asyncio

import msgspec
import numpy as np
import pytest

from fourstroke.engines.fleet import Fleet
from fourstroke.engines.router import Router
from fourstroke.engines.vllm import CHECKPOINT, REPLACEMENT
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine
from fourstroke.types import Publication, SampleRequest, VersionRun, WeightVersion

START_S = 60.0


class SlowEngine(FakeEngine):
    """Takes a minute to start from the base checkpoint."""

    async def start(self):
        await asyncio.sleep(START_S)
        await super().start()


def _request(number):
    return SampleRequest(
        id=f"g{number}",
        prompt_ids=np.array([1, 2], np.int32),
        num_samples=1,
        max_tokens=4,
        temperature=1.0,
        stop_ids=(),
        seed=number,
    )


async def _fleet_at_version_7(router):
    engines = {}

    def make(name, is_replacement):
        engines[name] = SlowEngine(name=name, held=REPLACEMENT if is_replacement else CHECKPOINT)
        return engines[name]

    async def route(routable):
        router.route(routable)

    async def write():
        number = fleet.version.number + 1
        version = WeightVersion(incarnation=0, number=number, digest=f"weights {number}")
        return Publication(version=version, path="", size_bytes=0, tensors=())

    fleet = Fleet(make, count=2, is_fresh=True, on_routable=route)
    await fleet.start()
    for _ in range(7):
        await fleet.publish(write)
    return fleet, engines


def _stamps(answers):
    return [(answer[0].engine, [(run.version, run.num_tokens) for run in answer[0].versions]) for answer in answers]


def test_four_requests_before_the_replacement_is_up_to_date_all_go_to_the_other_engine():
    async def scenario():
        router = Router()
        fleet, engines = await _fleet_at_version_7(router)
        engines["vllm-1"].kill()
        replacing = asyncio.create_task(fleet.replace("vllm-1"))
        await asyncio.sleep(START_S - 0.01)  # it is about to be there, with the weights of the base checkpoint
        before = await asyncio.gather(*(router.generate(_request(number)) for number in range(4)))
        successor = await replacing
        after = await asyncio.gather(*(router.generate(_request(number)) for number in range(2)))
        return before, after, successor.name, successor.version.number

    before, after, name, number = run_virtual(scenario())

    assert _stamps(before) == [("vllm-0", [(7, 4)])] * 4
    assert (name, number) == ("vllm-2", 7)
    assert _stamps(after) == [("vllm-0", [(7, 4)]), ("vllm-2", [(7, 4)])]


def test_with_no_other_engine_they_wait():
    async def scenario():
        router = Router()
        fleet, engines = await _fleet_at_version_7(router)
        await fleet.forget("vllm-0")
        engines["vllm-1"].kill()
        replacing = asyncio.create_task(fleet.replace("vllm-1"))
        await asyncio.sleep(START_S - 0.01)
        waiting = asyncio.gather(*(router.generate(_request(number)) for number in range(4)))
        await asyncio.sleep(0.005)
        assert not waiting.done()
        await replacing
        return await waiting

    assert _stamps(run_virtual(scenario())) == [("vllm-2", [(7, 4)])] * 4


@pytest.mark.parametrize(("stamp", "num_dropped"), [(0, 1), (4, 1), (5, 0)])
def test_a_sample_of_older_weights_than_the_bound_allows_is_rejected_and_counted(
    tmp_path, configure, live, monkeypatch, stamp, num_dropped
):
    """At trainer version 7 and a staleness of 2, whatever engine made it, and although its group was admitted at 7."""
    plain, told = FakeEngine.generate, []

    async def generate(self, request):
        answers = await plain(self, request)
        if self.version.number != 7 or told:
            return answers
        told.append(request.id)
        return tuple(
            msgspec.structs.replace(one, versions=(VersionRun(version=stamp, num_tokens=len(one.ids)),))
            for one in answers
        )

    monkeypatch.setattr(FakeEngine, "generate", generate)
    # The widest window leaves one slot a step, so that what is admitted at version 7 is trained on version 7.
    config = configure("num_steps=8", groups_per_step=1, staleness=2, window=3)

    life = live(tmp_path, config)

    assert life.error is None
    assert len(told) == 1
    assert life.audit.dropped_by_reason == ({"stale": num_dropped} if num_dropped else {})
    assert (life.audit.trained, life.audit.balanced) == (8, True)
