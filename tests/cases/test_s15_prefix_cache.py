"""S15: a prefix cache keyed by the prompt but not by the weights serves values of old weights after an update.

NVIDIA-NeMo/RL#4018; the same in prime-rl#1650, vllm#9744, pytorch/rl#4016.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fourstroke.config import EngineConfig
from fourstroke.engines.vllm import VllmEngine
from fourstroke.testing.policy import TinyPolicy, until_sampled_by
from fourstroke.testing.run import tiny_model
from fourstroke.types import Completion, SampleRequest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="missing: vllm"),
    # Third parties' warnings while vLLM is imported, 2026-11-30.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]

# More than vLLM's block of 128 tokens: a prompt within one block is never cached.
PROMPT = [(7 * position + 3) % 256 for position in range(300)]


@dataclass(frozen=True)
class Harness:
    engine: VllmEngine
    runner: asyncio.Runner
    policy: TinyPolicy
    log: Path

    async def ask(self, *, num_samples: int = 2, max_tokens: int = 8, seed: int = 0) -> tuple[Completion, ...]:
        request = SampleRequest(
            id="g0",
            prompt_ids=np.array(PROMPT, dtype=np.int32),
            num_samples=num_samples,
            max_tokens=max_tokens,
            temperature=1.0,
            stop_ids=(),
            seed=seed,
        )
        return await self.engine.generate(request)

    async def update(self) -> None:
        number = self.engine.version.number + 1
        self.policy.nudge(number)
        await self.engine.pause()
        await self.engine.update_weights(self.policy.publish(number))
        await self.engine.resume()


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("s15")
    model_path = tiny_model(folder / "model")
    config = EngineConfig(dtype="float32", max_model_len=512, max_num_seqs=8, kv_cache_gib=0.25, num_threads=1)
    engine = VllmEngine(config, model_path, seed=0, log_path=folder / "engine.log")
    policy = TinyPolicy(model_path, publication_path=folder / "weights")
    with asyncio.Runner() as runner:
        try:
            runner.run(engine.start())
            yield Harness(engine, runner, policy, folder / "engine.log")
        finally:
            runner.run(engine.close())
            policy.close()


def test_the_toy_numbers_of_the_case() -> None:
    """Cached value of token x under weight w is w * x, and the output is the sum."""
    old, new, prompt, request = 1.0, 1.5, [2, 3], [2, 3, 4]

    assert new * sum(request) == 13.5
    assert old * sum(prompt) + new * sum(request[len(prompt) :]) == 11.0


def test_a_cached_prompt_is_computed_anew_after_an_update(harness: Harness) -> None:
    harness.runner.run(harness.ask())
    harness.runner.run(harness.ask())
    harness.runner.run(harness.update())

    for completion in harness.runner.run(harness.ask()):
        assert [run.version for run in completion.versions] == [harness.engine.version.number]
        expected = harness.policy.logprobs(PROMPT, completion.ids.tolist(), temperature=1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_samples_of_one_group_that_straddle_an_update(harness: Harness) -> None:
    async def scenario() -> tuple[Completion, ...]:
        group = asyncio.create_task(harness.ask(num_samples=8, max_tokens=200, seed=5))
        await until_sampled_by(harness.engine, group, num_tokens=20)
        await harness.update()
        return await group

    completions = harness.runner.run(scenario())

    number = harness.engine.version.number
    straddling = [c for c in completions if [run.version for run in c.versions] == [number - 1, number]]
    assert straddling
    for completion in straddling:
        new = slice(completion.versions[0].num_tokens, None)
        expected = harness.policy.logprobs(PROMPT, completion.ids.tolist(), temperature=1.0)
        np.testing.assert_allclose(completion.logprobs[new], expected[new], atol=1e-4)


def test_the_cache_is_there_between_updates(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the reset the old values would be served: a pause that clears nothing must fail the first test here."""
    llm = harness.engine._llm
    assert llm is not None
    pause = llm.pause_generation

    async def lazy_pause(*, mode: str, clear_cache: bool) -> None:
        assert clear_cache
        await pause(mode=mode, clear_cache=False)  # type: ignore[arg-type]

    harness.runner.run(harness.ask())
    monkeypatch.setattr(llm, "pause_generation", lazy_pause)
    harness.runner.run(harness.update())

    (completion, *_) = harness.runner.run(harness.ask())
    expected = harness.policy.logprobs(PROMPT, completion.ids.tolist(), temperature=1.0)
    assert np.abs(completion.logprobs - expected).max() > 1e-3
