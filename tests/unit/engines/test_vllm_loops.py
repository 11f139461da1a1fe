"""The engine lives in whatever loop and thread its owner has: an actor's loop runs beside the main thread, and may be
uvloop's. Here a plain process stands where vLLM's core process does."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fourstroke.config import EngineConfig
from fourstroke.engines.vllm import VllmEngine
from fourstroke.errors import EngineDiedError


def uvloop_loop() -> asyncio.AbstractEventLoop:
    uvloop = pytest.importorskip("uvloop", reason="missing: uvloop")
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop_loop], ids=["asyncio", "uvloop"])
def test_a_death_is_seen_on_any_loop_in_any_thread(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        engine = VllmEngine(EngineConfig(), Path("model"), seed=0)
        process = multiprocessing.get_context("spawn").Process(target=signal.pause)
        process.start()
        engine._watch(process)
        waiting = asyncio.create_task(engine._call("a wait", asyncio.Event().wait()))
        await asyncio.sleep(0)
        process.kill()
        with pytest.raises(EngineDiedError):
            await waiting
        assert engine._watched == {}
        await engine.close()

    def live() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(asyncio.wait_for(scenario(), timeout=60))

    with ThreadPoolExecutor(1) as beside_the_main_thread:
        beside_the_main_thread.submit(live).result()
