"""What every engine must do, run on the fake one and on the real vLLM with a tiny random Llama in fp32."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from fourstroke.config import EngineConfig
from fourstroke.engines.vllm import VllmEngine
from fourstroke.errors import DataError, EngineDiedError, PublicationError
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.testing.policy import TinyPolicy
from fourstroke.testing.run import tiny_model
from fourstroke.types import Engine, Publication, SampleRequest, StopReason, WeightVersion

# Third parties' warnings while vLLM is imported, 2026-11-30.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

VOCAB_SIZE, MAX_MODEL_LEN = 257, 256
T = TypeVar("T")


@dataclass
class Harness:
    """An engine, the loop that it belongs to, and what its numbers must be."""

    engine: Engine
    runner: asyncio.Runner
    policy: TinyPolicy | None = None
    log_probability_tolerance: float = 1e-4
    number: int = field(default=0)

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(scenario)

    def next_publication(self) -> Publication:
        """The next version, with other weights than the last."""
        self.number += 1
        if self.policy is None:
            version = WeightVersion(incarnation=0, number=self.number, digest=f"{self.number:032x}")
            return Publication(version=version, path="nowhere", size_bytes=0, tensors=())
        self.policy.nudge(self.number)
        return self.policy.publish(self.number)

    def expected(self, prompt: Sequence[int], ids: Sequence[int], *, temperature: float) -> np.ndarray:
        """Log-probabilities of ``ids`` under the weights as they are now, computed apart from the engine."""
        if self.policy is not None:
            return self.policy.logprobs(prompt, ids, temperature=temperature)
        assert isinstance(self.engine, FakeEngine)
        logprobs = []
        for position, token in enumerate(ids):
            scaled = [x / temperature for x in self.engine.logits([*prompt, *ids[:position]], self.number)]
            logprobs.append(scaled[token] - np.log(sum(np.exp(x) for x in scaled)))
        return np.array(logprobs)


def fake(runner: asyncio.Runner, _: Path) -> Harness:
    settings = FakeEngineSettings(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, token_s=0.001)
    return Harness(engine=FakeEngine(settings), runner=runner)


def vllm(runner: asyncio.Runner, folder: Path) -> Harness:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("missing: vllm")
    model_path = tiny_model(folder / "model")
    config = EngineConfig(
        dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=32, kv_cache_gib=0.25, num_threads=1
    )
    engine = VllmEngine(config, model_path, seed=0, log_path=folder / "engine.log")
    policy = TinyPolicy(model_path, publication_path=folder / "weights")
    return Harness(engine=engine, runner=runner, policy=policy)


@pytest.fixture(scope="module", params=[fake, vllm], ids=["fake", "vllm"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with asyncio.Runner() as runner:
        made: Harness = request.param(runner, tmp_path_factory.mktemp("engine"))
        try:
            made.run(made.engine.start())
            yield made
        finally:
            made.run(made.engine.close())
            if made.policy is not None:
                made.policy.close()


def make_request(
    prompt: Sequence[int] = (72, 105, 33),
    *,
    id: str = "g0",  # noqa: A002
    num_samples: int = 4,
    max_tokens: int = 12,
    temperature: float = 1.0,
    stop_ids: tuple[int, ...] = (),
    seed: int = 7,
) -> SampleRequest:
    return SampleRequest(
        id=id,
        prompt_ids=np.array(prompt, dtype=np.int32),
        num_samples=num_samples,
        max_tokens=max_tokens,
        temperature=temperature,
        stop_ids=stop_ids,
        seed=seed,
    )


async def update(harness: Harness) -> WeightVersion:
    await harness.engine.pause()
    version = await harness.engine.update_weights(harness.next_publication())
    await harness.engine.resume()
    return version


def test_a_fresh_engine_holds_version_0(harness: Harness) -> None:
    assert (harness.engine.version.incarnation, harness.engine.version.number) == (0, harness.number)
    harness.run(harness.engine.check_health())


def test_shapes_types_and_lengths(harness: Harness) -> None:
    completions = harness.run(harness.engine.generate(make_request()))

    assert len(completions) == 4
    for completion in completions:
        assert completion.ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.ids.shape == completion.logprobs.shape == (12,)
        assert completion.stop is StopReason.LENGTH
        assert completion.engine == harness.engine.name
        assert [(run.version, run.num_tokens) for run in completion.versions] == [(harness.number, 12)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_the_distribution_that_was_sampled(harness: Harness, temperature: float) -> None:
    prompt = [10, 20, 30, 40, 50]
    completions = harness.run(harness.engine.generate(make_request(prompt, temperature=temperature, max_tokens=20)))

    for completion in completions:
        assert (completion.logprobs <= 0).all()
        expected = harness.expected(prompt, completion.ids.tolist(), temperature=temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=harness.log_probability_tolerance)


def test_a_sampled_stop_token_is_kept_and_ends_the_completion(harness: Harness) -> None:
    stop_ids = tuple(range(0, VOCAB_SIZE, 4))
    request = make_request(num_samples=16, max_tokens=60, stop_ids=stop_ids, temperature=2.0)

    completions = harness.run(harness.engine.generate(request))

    finished = [completion for completion in completions if completion.stop is StopReason.FINISHED]
    assert finished
    for completion in finished:
        assert completion.ids[-1] in stop_ids
        assert not set(completion.ids[:-1].tolist()) & set(stop_ids)
        expected = harness.expected(request.prompt_ids.tolist(), completion.ids.tolist(), temperature=2.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=harness.log_probability_tolerance)


def test_the_stop_ids_of_the_request_alone_end_a_completion(harness: Harness) -> None:
    """Token 256 is the model's own end of a turn; a request that does not name it goes on."""
    request = make_request(num_samples=32, max_tokens=100, temperature=2.0)
    completions = harness.run(harness.engine.generate(request))

    assert {completion.stop for completion in completions} == {StopReason.LENGTH}
    assert any(256 in completion.ids[:-1] for completion in completions)


def test_samples_of_a_request_are_distinct(harness: Harness) -> None:
    completions = harness.run(harness.engine.generate(make_request(num_samples=16)))

    assert len({completion.ids.tobytes() for completion in completions}) == 16


def test_neighbouring_seeds_share_no_samples(harness: Harness) -> None:
    first, second = (
        {c.ids.tobytes() for c in harness.run(harness.engine.generate(make_request(num_samples=8, seed=seed)))}
        for seed in (7, 8)
    )

    assert not first & second


def test_one_seed_gives_the_same_tokens(harness: Harness) -> None:
    first, second = (harness.run(harness.engine.generate(make_request())) for _ in range(2))

    for left, right in zip(first, second, strict=True):
        assert left.ids.tolist() == right.ids.tolist()


def test_requests_run_side_by_side_and_keep_apart(harness: Harness) -> None:
    async def scenario() -> list[list[list[int]]]:
        requests = [make_request([65 + n], id=f"g{n}", seed=n, num_samples=2) for n in range(6)]
        together = await asyncio.gather(*(harness.engine.generate(request) for request in requests))
        alone = [await harness.engine.generate(request) for request in requests]
        return [[c.ids.tolist() for group in groups for c in group] for groups in (together, alone)]

    together, alone = harness.run(scenario())

    assert together == alone


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (make_request([1, VOCAB_SIZE]), f"{VOCAB_SIZE}"),
        (make_request([-1, 1]), "outside the vocabulary"),
        (make_request([]), "prompt"),
        (make_request([1] * 250, max_tokens=7), "fit"),
    ],
)
def test_a_mistaken_request_is_refused(harness: Harness, request_: SampleRequest, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        harness.run(harness.engine.generate(request_))
    # And the engine goes on, up to the last token of the context.
    completions = harness.run(harness.engine.generate(make_request([1] * 250, max_tokens=6, num_samples=1)))
    assert len(completions[0].ids) == 6


def test_a_paused_engine_holds_requests_until_it_resumes(harness: Harness) -> None:
    async def scenario() -> tuple[bool, int]:
        await harness.engine.pause()
        request = asyncio.create_task(harness.engine.generate(make_request()))
        # A round trip through the engine, so that it has had its chance to answer.
        await harness.engine.check_health()
        done, _ = await asyncio.wait({request}, timeout=0.3)
        await harness.engine.resume()
        return bool(done), len(await request)

    assert harness.run(scenario()) == (False, 4)


def test_an_update_changes_version_and_distribution(harness: Harness) -> None:
    prompt = list(b"the same prompt before and after")
    before = harness.run(harness.engine.generate(make_request(prompt, num_samples=1)))[0]
    version = harness.run(update(harness))
    after = harness.run(harness.engine.generate(make_request(prompt, num_samples=1)))[0]

    assert harness.engine.version == version
    assert version.number == harness.number
    assert before.versions[0].version == harness.number - 1
    assert [(run.version, run.num_tokens) for run in after.versions] == [(harness.number, 12)]
    expected = harness.expected(prompt, after.ids.tolist(), temperature=1.0)
    np.testing.assert_allclose(after.logprobs, expected, atol=harness.log_probability_tolerance)
    stale = harness.expected(prompt, before.ids.tolist(), temperature=1.0)
    assert np.abs(before.logprobs - stale).max() > 10 * harness.log_probability_tolerance


def test_a_request_that_an_update_interrupts_goes_on_under_the_new_weights(harness: Harness) -> None:
    """Tokens before the update keep their version and log-probability; those after it are sampled from the new weights
    given everything before, recomputed (no key or value of the old weights is left)."""
    prompt = list(b"a prompt that is under way when the weights change")

    async def scenario() -> Any:
        request = asyncio.create_task(harness.engine.generate(make_request(prompt, num_samples=8, max_tokens=190)))
        # Long enough for a first token, which the next line of the scenario asserts.
        await asyncio.sleep(0.05)
        await update(harness)
        return await request

    completions = harness.run(scenario())

    runs = [[(run.version, run.num_tokens) for run in completion.versions] for completion in completions]
    straddling = [c for c, run in zip(completions, runs, strict=True) if len(run) == 2]
    assert straddling, runs
    for completion in straddling:
        assert [run.version for run in completion.versions] == [harness.number - 1, harness.number]
        new = slice(completion.versions[0].num_tokens, None)
        expected = harness.expected(prompt, completion.ids.tolist(), temperature=1.0)
        np.testing.assert_allclose(completion.logprobs[new], expected[new], atol=harness.log_probability_tolerance)


def test_a_publication_out_of_order_is_refused_and_nothing_changes(harness: Harness) -> None:
    held = harness.engine.version
    harness.next_publication()
    skipped = harness.next_publication()

    async def scenario() -> None:
        await harness.engine.pause()
        try:
            with pytest.raises(PublicationError, match=f"publication {skipped.version.number} does not follow"):
                await harness.engine.update_weights(skipped)
        finally:
            await harness.engine.resume()

    harness.run(scenario())
    harness.number -= 2

    assert harness.engine.version == held
    (completion,) = harness.run(harness.engine.generate(make_request(num_samples=1)))
    assert completion.versions[0].version == held.number


def test_zz_a_closed_engine_refuses_everything(harness: Harness) -> None:
    """Last in this file, since it ends the engine that the others share."""

    async def scenario() -> None:
        engine = harness.engine
        waiting = asyncio.create_task(engine.generate(make_request(max_tokens=200, num_samples=16)))
        await asyncio.sleep(0.01)
        await engine.close()
        await engine.close()
        publication = harness.next_publication()
        for call in (
            waiting,
            engine.generate(make_request()),
            engine.pause(),
            engine.resume(),
            engine.update_weights(publication),
            engine.check_health(),
        ):
            with pytest.raises(EngineDiedError, match=engine.name):
                await call

    harness.run(scenario())
