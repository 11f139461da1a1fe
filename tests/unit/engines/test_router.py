"""The router: the engine with the least to do, never a dead one, and patience where there is none."""

import asyncio

import numpy as np
import pytest

from fourstroke.engines.router import Router, least_loaded
from fourstroke.errors import EngineDiedError
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.types import SampleRequest


def _request(number=0, *, num_samples=1, max_tokens=3):
    return SampleRequest(
        id=f"g{number}",
        prompt_ids=np.array([1, 2], np.int32),
        num_samples=num_samples,
        max_tokens=max_tokens,
        temperature=1.0,
        stop_ids=(),
        seed=number,
    )


async def _started(*names, settings=None):
    engines = [FakeEngine(settings, name=name) for name in names]
    for engine in engines:
        await engine.start()
    return engines


def _engines_of(answers):
    return [completion.engine for answer in answers for completion in answer]


def test_of_equally_loaded_engines_the_first_is_taken():
    assert least_loaded(["a", "b", "c"], {"a": 2, "b": 1, "c": 1}) == "b"
    assert least_loaded(["a", "b"], {}) == "a"


def test_samples_under_way_are_counted_and_not_requests():
    async def scenario():
        router = Router()
        router.route(await _started("a", "b"))
        sizes = [8, 2, 2, 2, 2, 1]  # 8 to a; b has fewer until it has 8 too
        return await asyncio.gather(*(router.generate(_request(n, num_samples=size)) for n, size in enumerate(sizes)))

    answers = run_virtual(scenario())

    assert [answer[0].engine for answer in answers] == ["a", "b", "b", "b", "b", "a"]


def test_what_is_done_or_cancelled_counts_no_more():
    async def scenario():
        router = Router()
        router.route(await _started("a", "b"))
        long = asyncio.create_task(router.generate(_request(num_samples=8, max_tokens=1000)))
        await asyncio.sleep(0.01)
        during = await router.generate(_request(1))
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        return _engines_of([during, await router.generate(_request(2))])

    assert run_virtual(scenario()) == ["b", "a"]


def test_an_engine_that_died_is_not_asked_again_even_if_it_is_named_again():
    async def scenario():
        router = Router()
        engines = await _started("a", "b")
        router.route(engines)
        engines[0].kill()
        with pytest.raises(EngineDiedError, match="signal 9"):
            await router.generate(_request())
        before = await router.generate(_request(1))
        router.route(engines)  # whoever routes has not seen the death yet
        return _engines_of([before, await router.generate(_request(2))])

    assert run_virtual(scenario()) == ["b", "b"]


def test_a_request_waits_until_an_engine_may_be_routed_to():
    async def scenario():
        router = Router()
        (engine,) = await _started("a")
        waiting = asyncio.create_task(router.generate(_request()))
        await asyncio.sleep(3600)
        assert not waiting.done()
        router.route([engine])
        return _engines_of([await waiting])

    assert run_virtual(scenario()) == ["a"]


def test_the_last_engines_death_makes_requests_wait_for_its_successor():
    async def scenario():
        router = Router()
        engines = await _started("a", "b")
        router.route(engines[:1])
        engines[0].kill()
        with pytest.raises(EngineDiedError):
            await router.generate(_request())
        waiting = asyncio.create_task(router.generate(_request(1)))
        await asyncio.sleep(60)
        assert not waiting.done()
        router.route(engines[1:])
        return _engines_of([await waiting])

    assert run_virtual(scenario()) == ["b"]


def test_what_is_under_way_stays_where_it_is():
    async def scenario():
        router = Router()
        first, second = await _started("a", "b")
        router.route([first])
        under_way = asyncio.create_task(router.generate(_request(max_tokens=10)))
        await asyncio.sleep(0.05)
        router.route([second])
        return _engines_of([await router.generate(_request(1)), await under_way])

    assert run_virtual(scenario()) == ["b", "a"]


def test_requests_together_go_to_one_engine():
    async def scenario():
        router = Router()
        router.route(await _started("a", "b"))
        return _engines_of(await router.generate_together([_request(n, num_samples=2) for n in range(3)]))

    assert run_virtual(scenario()) == ["a"] * 6


def test_a_death_among_requests_together_is_noticed():
    async def scenario():
        router = Router()
        router.route(await _started("a", settings=FakeEngineSettings(dies_at_request=1)))
        with pytest.raises(EngineDiedError):
            await router.generate_together([_request(n) for n in range(3)])
        waiting = asyncio.create_task(router.generate_together([_request()]))
        await asyncio.sleep(60)
        assert not waiting.done()
        router.route(await _started("b"))
        return _engines_of(await waiting)

    assert run_virtual(scenario()) == ["b"]
