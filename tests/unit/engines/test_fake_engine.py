"""The fake engine in virtual time: pauses, updates in flight, deaths; the rest is in the engines' contract."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fourstroke.engines.vllm import REPLACEMENT
from fourstroke.errors import EngineDiedError, PublicationError
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.types import Completion, Publication, SampleRequest, StopReason, WeightVersion
from fourstroke.weights.publish import Publisher, TensorSpec


def make_request(*, num_samples: int = 2, max_tokens: int = 10, stop_ids: tuple[int, ...] = ()) -> SampleRequest:
    return SampleRequest(
        id="g0",
        prompt_ids=np.array([1, 2], dtype=np.int32),
        num_samples=num_samples,
        max_tokens=max_tokens,
        temperature=1.0,
        stop_ids=stop_ids,
        seed=3,
    )


def publication(number: int, *, incarnation: int = 0) -> Publication:
    version = WeightVersion(incarnation=incarnation, number=number, digest=f"{number:032x}")
    return Publication(version=version, path="nowhere", size_bytes=0, tensors=())


async def started(settings: FakeEngineSettings | None = None) -> FakeEngine:
    engine = FakeEngine(settings)
    await engine.start()
    return engine


def test_tokens_take_time_and_members_go_side_by_side() -> None:
    async def scenario() -> float:
        engine = await started(FakeEngineSettings(token_s=0.5))
        await engine.generate(make_request(num_samples=8))
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(5.0)


def test_a_request_that_an_update_interrupts_carries_both_versions() -> None:
    async def scenario() -> tuple[Completion, ...]:
        engine = await started(FakeEngineSettings(token_s=1.0))
        request = asyncio.create_task(engine.generate(make_request()))
        await asyncio.sleep(4.5)
        await engine.pause()
        await asyncio.sleep(100)
        await engine.update_weights(publication(1))
        await engine.resume()
        return await request

    for completion in run_virtual(scenario()):
        assert [(run.version, run.num_tokens) for run in completion.versions] == [(0, 4), (1, 6)]


def test_a_callers_distribution_is_sampled_at_the_temperature() -> None:
    def certain(ids: Sequence[int]) -> np.ndarray:
        """After n tokens of reply, id n + 4 has all of the probability."""
        logits_V = np.full(32, -np.inf)
        logits_V[len(ids) + 2] = 0.0
        return logits_V

    async def scenario() -> tuple[Completion, ...]:
        engine = FakeEngine(logits_fn=certain)
        await engine.start()
        return await engine.generate(make_request(stop_ids=(7,)))

    for completion in run_virtual(scenario()):
        assert completion.ids.tolist() == [4, 5, 6, 7]
        assert completion.logprobs.tolist() == [0.0, 0.0, 0.0, 0.0]
        assert completion.stop is StopReason.FINISHED


def test_it_dies_at_the_request_that_it_is_told_to_and_takes_the_waiting_ones_along() -> None:
    async def scenario() -> None:
        engine = await started(FakeEngineSettings(dies_at_request=1, token_s=1.0))
        waiting = asyncio.create_task(engine.generate(make_request()))
        await asyncio.sleep(0.1)
        for call in (engine.generate(make_request()), waiting, engine.check_health()):
            with pytest.raises(EngineDiedError, match=r"process 4711 ended with signal 9"):
                await call

    run_virtual(scenario())


def test_a_death_ends_requests_that_are_held_by_a_pause() -> None:
    async def scenario() -> None:
        engine = await started()
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(make_request()))
        await asyncio.sleep(1)
        engine.kill()
        with pytest.raises(EngineDiedError):
            await waiting

    run_virtual(scenario())


def test_a_newer_incarnation_begins_anywhere() -> None:
    async def scenario() -> int:
        engine = await started()
        await engine.pause()
        await engine.update_weights(publication(1))
        with pytest.raises(PublicationError, match="does not follow"):
            await engine.update_weights(publication(3))
        return (await engine.update_weights(publication(7, incarnation=1))).number

    assert run_virtual(scenario()) == 7


def test_a_replacement_catches_up_with_any_publication_and_may_get_it_again() -> None:
    async def scenario() -> FakeEngine:
        engine = FakeEngine(held=REPLACEMENT)
        await engine.start()
        assert (engine.version.incarnation, engine.version.number) == (-1, 0)
        await engine.pause()
        for _ in range(2):
            assert await engine.update_weights(publication(7)) == engine.version == publication(7).version
        with pytest.raises(PublicationError, match="publication 9 does not follow version 7"):
            await engine.update_weights(publication(9))
        other = WeightVersion(incarnation=0, number=7, digest="another")
        with pytest.raises(PublicationError, match="publication 7 does not follow version 7"):
            await engine.update_weights(Publication(version=other, path="nowhere", size_bytes=0, tensors=()))
        return engine

    assert run_virtual(scenario()).version.number == 7


def test_a_drained_pause_takes_as_long_as_the_longest_request_and_holds_new_ones() -> None:
    async def scenario() -> tuple[float, tuple[Completion, ...], tuple[Completion, ...]]:
        engine = await started(FakeEngineSettings(token_s=1.0, landing="drain"))
        running = [asyncio.create_task(engine.generate(make_request(max_tokens=n))) for n in (4, 10)]
        await asyncio.sleep(2.5)
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(1)
        late = asyncio.create_task(engine.generate(make_request()))
        await pausing
        paused_s = asyncio.get_running_loop().time()
        await asyncio.sleep(100)
        await engine.update_weights(publication(1))
        await engine.resume()
        return paused_s, await running[1], await late

    paused_s, early, late = run_virtual(scenario())

    assert paused_s == pytest.approx(10.0)
    assert [(run.version, run.num_tokens) for run in early[0].versions] == [(0, 10)]
    assert [(run.version, run.num_tokens) for run in late[0].versions] == [(1, 10)]


def test_a_death_ends_a_pause_that_drains() -> None:
    async def scenario() -> None:
        engine = await started(FakeEngineSettings(token_s=1.0, landing="drain"))
        running = asyncio.create_task(engine.generate(make_request()))
        await asyncio.sleep(2.5)
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(1)
        engine.kill()
        for call in (pausing, running):
            with pytest.raises(EngineDiedError):
                await call

    run_virtual(scenario())


def test_a_pause_that_begins_as_another_ends_still_holds_new_requests() -> None:
    async def scenario() -> bool:
        engine = await started(FakeEngineSettings(token_s=1.0, landing="drain"))
        await engine.pause()
        late = asyncio.create_task(engine.generate(make_request()))
        await asyncio.sleep(1)
        await engine.resume()
        await engine.pause()
        await asyncio.sleep(100)
        was_done = late.done()
        await engine.resume()
        await late
        return was_done

    assert run_virtual(scenario()) is False


def test_nothing_is_computed_for_a_caller_that_was_cancelled() -> None:
    computed = 0

    def logits(_: Sequence[int]) -> np.ndarray:
        nonlocal computed
        computed += 1
        return np.zeros(32)

    async def scenario() -> None:
        engine = FakeEngine(FakeEngineSettings(token_s=1.0), logits_fn=logits)
        await engine.start()
        request = asyncio.create_task(engine.generate(make_request(num_samples=3)))
        await asyncio.sleep(4.5)
        request.cancel()
        await asyncio.sleep(100)
        assert (request.cancelled(), engine.num_running) == (True, 0)

    run_virtual(scenario())

    assert computed == 3 * 4


def test_given_shapes_it_verifies_a_real_publication(tmp_path: Path) -> None:
    shapes = {"w": (2,)}
    publisher = Publisher(tmp_path / "weights", entries=[TensorSpec(name="w", dtype="float32", shape=(2,))])

    async def scenario() -> None:
        engine = await started(FakeEngineSettings(shapes=shapes))
        await engine.pause()
        assert await engine.update_weights(first) == first.version
        second = publisher.publish(2, [("w", torch.ones(2))], incarnation=0)
        publisher.publish(3, [("w", torch.zeros(2))], incarnation=0)
        with pytest.raises(PublicationError, match="tensor w arrived with digest"):
            await engine.update_weights(second)
        assert engine.version == first.version

    first = publisher.publish(1, [("w", torch.zeros(2))], incarnation=0)
    run_virtual(scenario())
    publisher.close()
