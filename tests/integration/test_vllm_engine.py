"""The real engine's life: agreement with Transformers, batches that repeat bit for bit, a calm terminal, death by
SIGKILL, and no process left."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest

from fourstroke.config import EngineConfig, process_settings
from fourstroke.engines.vllm import CHECKPOINT, REPLACEMENT, VllmEngine
from fourstroke.errors import EngineDiedError
from fourstroke.testing.policy import TinyPolicy
from fourstroke.testing.run import tiny_model
from fourstroke.trainer.catalogue import resolve_model
from fourstroke.types import Completion, SampleRequest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="missing: vllm"),
    # Third parties' warnings while vLLM is imported, 2026-11-30.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]

T = TypeVar("T")

CONFIG = EngineConfig(dtype="float32", max_model_len=256, max_num_seqs=16, kv_cache_gib=0.25, num_threads=1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def largest_model_path() -> Path:
    """The catalogue's model of 135 M parameters, converted here if it was not yet."""
    return resolve_model("smollm2-135m-instruct", cache_dir=process_settings().cache_dir)


@pytest.fixture(autouse=True)
def rubbish_is_collected_here() -> Iterator[None]:
    """What vLLM leaves open when its start fails is found in the test that made it fail."""
    yield
    gc.collect()


def make_request(*, num_samples: int = 4, max_tokens: int = 40, id: str = "g0") -> SampleRequest:  # noqa: A002
    return SampleRequest(
        id=id,
        prompt_ids=np.array([72, 101, 108, 108, 111], dtype=np.int32),
        num_samples=num_samples,
        max_tokens=max_tokens,
        temperature=1.0,
        stop_ids=(),
        seed=11,
    )


def children(pid: int) -> set[int]:
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def core_of(engine: VllmEngine) -> int:
    (process,) = engine._processes
    assert process.pid is not None
    return process.pid


def test_in_fp32_the_first_step_agrees_with_the_trainers_side(largest_model_path: Path, tmp_path: Path) -> None:
    """No update yet: mean |log ratio| under 1e-4, at temperature 1."""

    async def scenario() -> list[float]:
        engine = VllmEngine(CONFIG, largest_model_path, seed=0, log_path=tmp_path / "engine.log")
        try:
            await engine.start()
            request = make_request()
            completions = await engine.generate(request)
        finally:
            await engine.close()
        return [
            float(difference)
            for c in completions
            for difference in c.logprobs - policy.logprobs(request.prompt_ids.tolist(), c.ids.tolist(), temperature=1.0)
        ]

    policy = TinyPolicy(largest_model_path, publication_path=tmp_path / "weights")
    log_ratios = asyncio.run(scenario())
    policy.close()

    assert len(log_ratios) == 160
    assert np.abs(log_ratios).mean() < 1e-4


def live_as_an_actor_does(scenario: Coroutine[Any, Any, T]) -> T:
    """On uvloop's loop (vLLM requires the package), in a thread beside the main one."""
    import uvloop

    def live() -> T:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(scenario)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(live).result()


def batch(num_requests: int) -> list[SampleRequest]:
    """Prompts of 1 to 105 tokens, replies of up to 16, four of each."""
    return [
        SampleRequest(
            id=f"g{n}",
            prompt_ids=np.array([40 + n] * (1 + 13 * (n % 9)), dtype=np.int32),
            num_samples=4,
            max_tokens=12 + n % 5,
            temperature=1.0,
            stop_ids=(0, 1, 2, 3, 4, 5, 6, 7),
            seed=n,
        )
        for n in range(num_requests)
    ]


async def batches_of_a_life(
    engine: VllmEngine, policy: TinyPolicy, requests: list[SampleRequest], *, number: int
) -> list[tuple[tuple[Completion, ...], ...]]:
    """Two batches, one after publication ``number`` of the weights as they are, and death in the middle of a last."""
    held = engine.version
    try:
        await engine.start()
        assert engine.version == held
        before = [await engine.generate_together(requests) for _ in range(2)]
        await engine.pause()
        publication = policy.publish(number)
        for _ in range(2):
            assert await engine.update_weights(publication) == publication.version
        await engine.resume()
        after = await engine.generate_together(requests)
        dying = asyncio.create_task(engine.generate_together(requests))
        await engine.check_health()
        os.kill(core_of(engine), signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="ended with signal 9"):
            await dying
    finally:
        await engine.close()
    assert {run.version for groups in before for group in groups for c in group for run in c.versions} == {0}
    assert {run.version for group in after for c in group for run in c.versions} == {number}
    return [*before, after]


@pytest.mark.parametrize(
    ("model", "num_requests"),
    # In the larger one bits depend on what is computed together, in the tiny one not.
    [("model_path", 40), pytest.param("largest_model_path", 12, marks=pytest.mark.slow)],
)
def test_a_batch_repeats_bit_for_bit_over_rounds_updates_and_engines(
    model: str, num_requests: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """16 completions are decoded at a time. The second engine is a replacement: it catches up with publication 7."""
    model_path: Path = request.getfixturevalue(model)
    policy = TinyPolicy(model_path, publication_path=tmp_path / "weights")
    first, second = (
        VllmEngine(CONFIG, model_path, seed=0, log_path=tmp_path / "engine.log", held=held)
        for held in (CHECKPOINT, REPLACEMENT)
    )
    requests = batch(num_requests)

    batches = asyncio.run(batches_of_a_life(first, policy, requests, number=1))
    batches += live_as_an_actor_does(batches_of_a_life(second, policy, requests, number=7))
    policy.close()

    bits = [[(c.ids.tobytes(), c.logprobs.tobytes(), c.stop) for group in groups for c in group] for groups in batches]
    assert len(bits) == 6
    assert len(set(bits[0])) == 4 * num_requests
    assert all(other == bits[0] for other in bits[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_an_update_lands_and_agrees(model_path: Path, tmp_path: Path) -> None:
    """The same code on the other backend; asynchronous scheduling is on there. TF32 in neither side's products."""
    policy = TinyPolicy(model_path, publication_path=tmp_path / "weights")

    async def scenario() -> list[float]:
        engine = VllmEngine(CONFIG, model_path, seed=0, log_path=tmp_path / "engine.log")
        try:
            await engine.start()
            waiting = asyncio.create_task(engine.generate(make_request(max_tokens=200)))
            await engine.check_health()
            await engine.pause()
            policy.nudge(1)
            await engine.update_weights(policy.publish(1))
            await engine.resume()
            await waiting
            request = make_request()
            completions = await engine.generate(request)
        finally:
            await engine.close()
        assert {run.version for c in completions for run in c.versions} == {1}
        return [
            float(difference)
            for c in completions
            for difference in c.logprobs - policy.logprobs(request.prompt_ids.tolist(), c.ids.tolist(), temperature=1.0)
        ]

    log_ratios = asyncio.run(scenario())
    policy.close()

    assert np.abs(log_ratios).mean() < 1e-3


def test_a_killed_core_is_named_at_once_and_nothing_of_it_is_left(model_path: Path, tmp_path: Path) -> None:
    before = children(os.getpid())

    async def scenario() -> None:
        engine = VllmEngine(CONFIG, model_path, seed=0, log_path=tmp_path / "engine.log")
        await engine.start()
        pid = core_of(engine)
        waiting = [asyncio.create_task(engine.generate(make_request(max_tokens=250, id=f"g{n}"))) for n in range(3)]
        await engine.check_health()
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            for call in (*waiting, engine.check_health(), engine.generate(make_request()), engine.pause()):
                with pytest.raises(EngineDiedError, match=rf"vllm-0: process EngineCore \({pid}\) ended with signal 9"):
                    await call
            await engine.close()

    live_as_an_actor_does(scenario())

    assert [pid for pid in children(os.getpid()) - before if is_core(pid)] == []


def is_core(pid: int) -> bool:
    return is_alive(pid) and "resource_tracker" not in " ".join(psutil.Process(pid).cmdline())


async def look_again_and_again(engine: VllmEngine) -> None:
    while True:
        await engine.check_health()
        await asyncio.sleep(0.05)


def test_an_idle_engine_that_dies_is_found_by_a_look_at_its_health(model_path: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = VllmEngine(CONFIG, model_path, seed=0, log_path=tmp_path / "engine.log")
        await engine.start()
        os.kill(core_of(engine), signal.SIGKILL)
        try:
            async with asyncio.timeout(5):
                with pytest.raises(EngineDiedError, match="ended with signal 9"):
                    await look_again_and_again(engine)
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_a_start_that_is_given_up_leaves_no_process(model_path: Path, tmp_path: Path) -> None:
    before = children(os.getpid())

    async def scenario() -> None:
        engine = VllmEngine(CONFIG, model_path, seed=0, log_path=tmp_path / "engine.log")
        starting = asyncio.create_task(engine.start())
        while not [pid for pid in children(os.getpid()) - before if is_core(pid)]:
            await asyncio.sleep(0.05)
            assert not starting.done(), starting
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await engine.close()
        with pytest.raises(EngineDiedError, match="was not started"):
            await engine.check_health()

    asyncio.run(scenario())

    assert [pid for pid in children(os.getpid()) - before if is_core(pid)] == []


def test_a_model_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "model_type": "llama", "architectures": ["Nonesuch"]}')

    async def scenario() -> None:
        engine = VllmEngine(CONFIG, tmp_path, seed=0, log_path=tmp_path / "engine.log")
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineDiedError, match=r"(?s)vllm-0 cannot start .*Nonesuch"):
        asyncio.run(scenario())


# --- in a process of its own ----------------------------------------------------------------------------------------

SCRIPT = """
import asyncio, sys
from pathlib import Path
from fourstroke.config import EngineConfig
from fourstroke.engines.vllm import VllmEngine


async def main(model_path, seconds):
    config = EngineConfig(dtype="float32", max_model_len=256, max_num_seqs=16, kv_cache_gib=0.25, num_threads=1)
    engine = VllmEngine(config, Path(model_path), seed=0)
    await engine.start()
    print("ready", flush=True)
    await asyncio.sleep(float(seconds))
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


async def start_script(folder: Path, model_path: Path, *, seconds: float) -> asyncio.subprocess.Process:
    script = folder / "hold_an_engine.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        str(model_path),
        str(seconds),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_a_killed_parent_takes_every_process_with_it(model_path: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        process = await start_script(tmp_path, model_path, seconds=600)
        descendants = children(process.pid)
        assert descendants
        process.kill()
        await process.wait()
        async with asyncio.timeout(5):
            while any(is_alive(pid) for pid in descendants):  # noqa: ASYNC110 (no event tells of others' processes)
                await asyncio.sleep(0.05)

    run(scenario())


def test_an_idle_engine_burns_nothing_and_a_closed_one_has_said_nothing(model_path: Path, tmp_path: Path) -> None:
    """Processor time of an idle second, of all processes together; then the terminal of a whole life."""

    async def scenario() -> None:
        process = await start_script(tmp_path, model_path, seconds=3)
        family = [psutil.Process(pid) for pid in (process.pid, *children(process.pid))]
        before_s = [sum(member.cpu_times()[:2]) for member in family]
        await asyncio.sleep(1.5)
        used_s = sum(sum(member.cpu_times()[:2]) for member in family) - sum(before_s)
        out, err = await process.communicate()

        assert used_s < 0.3
        assert (out.decode(), err.decode(), process.returncode) == ("", "", 0)

    run(scenario())
