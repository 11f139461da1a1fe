"""What every engine must do under each landing, run on the fake one and on the real vLLM with a tiny random Llama in
fp32. Two of the landings on vLLM are left to the slow tests, since each engine takes a while to start."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from fourstroke.config import EngineConfig
from fourstroke.engines.vllm import VllmEngine
from fourstroke.errors import DataError, EngineDiedError, PublicationError
from fourstroke.testing.clock import VirtualClockLoop
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.testing.policy import TinyPolicy, until_sampled_by
from fourstroke.testing.run import tiny_model
from fourstroke.types import Canary, Completion, Engine, Publication, SampleRequest, StopReason, WeightVersion

# Third parties' warnings while vLLM is imported, 2026-11-30.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

VOCAB_SIZE, MAX_MODEL_LEN = 257, 256
# Of the fake, in virtual time.
TOKEN_S = 0.001
T = TypeVar("T")


@dataclass
class Harness:
    """An engine, the loop that it belongs to, and what its numbers must be."""

    engine: Engine
    runner: asyncio.Runner
    landing: str
    policy: TinyPolicy | None = None
    log_probability_tolerance: float = 1e-4
    number: int = field(default=0)

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(scenario)

    def next_publication(self) -> Publication:
        """The next version, with other weights than the last."""
        self.number += 1
        if self.policy is not None:
            self.policy.nudge(self.number)
        return self.same_publication()

    def same_publication(self) -> Publication:
        """The weights as they are, under the present number."""
        if self.policy is not None:
            return self.policy.publish(self.number)
        version = WeightVersion(incarnation=0, number=self.number, digest=f"{self.number:032x}")
        return Publication(version=version, path="nowhere", size_bytes=0, tensors=())

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


def fake(runner: asyncio.Runner, _: Path, landing: Any) -> Harness:
    settings = FakeEngineSettings(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, token_s=TOKEN_S, landing=landing)
    return Harness(engine=FakeEngine(settings), runner=runner, landing=landing)


def vllm(runner: asyncio.Runner, folder: Path, landing: Any) -> Harness:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("missing: vllm")
    model_path = tiny_model(folder / "model")
    config = EngineConfig(
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        kv_cache_gib=0.25,
        num_threads=1,
        landing=landing,
    )
    engine = VllmEngine(config, model_path, seed=0, log_path=folder / "engine.log")
    policy = TinyPolicy(model_path, publication_path=folder / "weights")
    return Harness(engine=engine, runner=runner, landing=landing, policy=policy)


LANDINGS = ("keep", "keep_kv", "drain", "abort")
MAKERS = [
    *(pytest.param((fake, landing), id=f"fake-{landing}") for landing in LANDINGS),
    *(pytest.param((vllm, landing), id=f"vllm-{landing}") for landing in ("keep", "abort")),
    *(pytest.param((vllm, landing), id=f"vllm-{landing}", marks=pytest.mark.slow) for landing in ("keep_kv", "drain")),
]


@pytest.fixture(scope="module", params=MAKERS)
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    make: Callable[[asyncio.Runner, Path, str], Harness]
    make, landing = request.param
    with asyncio.Runner(loop_factory=VirtualClockLoop if make is fake else None) as runner:
        made = make(runner, tmp_path_factory.mktemp("engine"), landing)
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


@pytest.mark.parametrize("is_paused", [False, True])
def test_fixed_tokens_are_scored_under_the_weights_that_are_held(harness: Harness, is_paused: bool) -> None:
    ids_BT = np.array([[72, 105, 33, 32, 9, 9], [1, 2, 3, 4, 5, 6]], dtype=np.int32)

    async def scenario() -> list[Canary]:
        if is_paused:
            await harness.engine.pause()
        found = [await harness.engine.score(ids_BT)]
        if is_paused:
            await harness.engine.resume()
        return found

    for expectation in range(2):
        if expectation:
            harness.run(update(harness))
        (found,) = harness.run(scenario())
        np.testing.assert_array_equal(found.ids_BT, ids_BT)
        assert found.logprobs_BT.dtype == np.float32
        for row, logprobs in zip(ids_BT.tolist(), found.logprobs_BT, strict=True):
            expected = harness.expected(row[:1], row[1:], temperature=1.0)
            np.testing.assert_allclose(logprobs, expected, atol=harness.log_probability_tolerance)


def test_scoring_beside_requests_changes_none_of_them(harness: Harness) -> None:
    async def scenario() -> tuple[Completion, ...]:
        request = begun(harness)
        await until_sampled(harness, request, num_tokens=20)
        await harness.engine.score(np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32))
        return await request

    for completion in harness.run(scenario()):
        expected = harness.expected(UNDER_WAY, completion.ids.tolist(), temperature=1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=harness.log_probability_tolerance)


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


UNDER_WAY = list(b"a prompt that is under way when the weights change")


def begun(harness: Harness, *, num_samples: int = 8) -> asyncio.Task[tuple[Completion, ...]]:
    """A request of many tokens, under way."""
    request = make_request(UNDER_WAY, num_samples=num_samples, max_tokens=190)
    return asyncio.get_running_loop().create_task(harness.engine.generate(request))


async def until_sampled(harness: Harness, request: asyncio.Task[Any], *, num_tokens: int) -> None:
    """Wait until some completion has so many tokens more than now, or the request is done."""
    if harness.policy is None:
        await asyncio.sleep((num_tokens + 0.5) * TOKEN_S)
        return
    assert isinstance(harness.engine, VllmEngine)
    await until_sampled_by(harness.engine, request, num_tokens=num_tokens)


def interrupted(harness: Harness) -> tuple[Completion, ...]:
    """A request during which the weights changed."""

    async def scenario() -> tuple[Completion, ...]:
        request = begun(harness)
        await until_sampled(harness, request, num_tokens=20)
        await update(harness)
        return await request

    return harness.run(scenario())


def mismatch(harness: Harness, completion: Completion) -> np.ndarray:
    """How far each log-probability is from that under the weights as they are now, with every value computed anew."""
    prompt = list(b"a prompt that is under way when the weights change")
    return np.abs(completion.logprobs - harness.expected(prompt, completion.ids.tolist(), temperature=1.0))


def test_an_interrupted_completion_is_whole_and_labelled(harness: Harness) -> None:
    """All tokens of one completion, however it landed: 190, with each token's version."""
    old, new = harness.number, harness.number + 1
    completions = interrupted(harness)

    for completion in completions:
        assert completion.stop is StopReason.LENGTH
        assert completion.ids.shape == completion.logprobs.shape == (190,)
    labels = {tuple(run.version for run in completion.versions) for completion in completions}
    assert labels == ({(old,)} if harness.landing == "drain" else {(old, new)})


def test_tokens_after_the_update_are_the_new_weights(harness: Harness) -> None:
    """Those before it keep their log-probability; those after it are sampled given everything before, recomputed, with
    no key or value of the old weights left; except where keeping those is what was asked for."""
    completions = interrupted(harness)

    for completion in completions:
        old = slice(0, completion.versions[0].num_tokens)
        new = slice(old.stop, None)
        difference = mismatch(harness, completion)
        assert difference[old].max() > 10 * harness.log_probability_tolerance
        if harness.landing in ("keep", "abort"):
            assert difference[new].max() < harness.log_probability_tolerance
        elif harness.landing == "keep_kv":
            assert difference[new].max() > 10 * harness.log_probability_tolerance


def test_a_request_that_is_interrupted_twice_is_whole(harness: Harness) -> None:
    async def scenario() -> tuple[Completion, ...]:
        request = begun(harness)
        for _ in range(2):
            await until_sampled(harness, request, num_tokens=20)
            await update(harness)
        return await request

    first = harness.number
    completions = harness.run(scenario())

    expected = [first] if harness.landing == "drain" else [first, first + 1, first + 2]
    for completion in completions:
        assert completion.ids.shape == (190,)
        assert [run.version for run in completion.versions] == expected
        assert harness.landing == "drain" or completion.versions[1].num_tokens > 0


def test_members_that_ended_before_the_update_are_kept(harness: Harness) -> None:
    """With stop tokens the members end at different times, some before the update and some after it."""
    stop_ids = (3, 77)

    async def scenario() -> tuple[Completion, ...]:
        request = make_request(num_samples=24, max_tokens=200, stop_ids=stop_ids, temperature=2.0, seed=3)
        task = asyncio.create_task(harness.engine.generate(request))
        await until_sampled(harness, task, num_tokens=60)
        await update(harness)
        return await task

    old = harness.number
    completions = harness.run(scenario())

    runs = [[run.version for run in completion.versions] for completion in completions]
    assert [old] in runs
    assert harness.landing == "drain" or [old, old + 1] in runs
    for completion in completions:
        is_stopped = completion.ids[-1] in stop_ids
        assert completion.stop is (StopReason.FINISHED if is_stopped else StopReason.LENGTH)
        assert is_stopped or len(completion.ids) == 200
        assert not set(completion.ids[:-1].tolist()) & set(stop_ids)


def test_a_pause_without_an_update_changes_no_label(harness: Harness) -> None:
    async def scenario() -> tuple[Completion, ...]:
        request = begun(harness)
        for _ in range(2):
            await until_sampled(harness, request, num_tokens=20)
            await harness.engine.pause()
            await harness.engine.resume()
        return await request

    for completion in harness.run(scenario()):
        assert [(run.version, run.num_tokens) for run in completion.versions] == [(harness.number, 190)]
        assert harness.landing == "drain" or mismatch(harness, completion).max() < harness.log_probability_tolerance


def test_a_request_that_was_not_begun_is_all_of_the_new_weights(harness: Harness) -> None:
    """More members than run at once, of one prompt longer than a cached block: the late ones share nothing that was
    cached before the update, although they were asked for before it."""
    prompt = [(7 * position + 3) % 256 for position in range(150)]

    async def scenario() -> tuple[Completion, ...]:
        request = make_request(prompt, num_samples=80, max_tokens=60)
        task = asyncio.create_task(harness.engine.generate(request))
        await until_sampled(harness, task, num_tokens=20)
        await update(harness)
        return await task

    completions = harness.run(scenario())

    late = [c for c in completions if [run.version for run in c.versions] == [harness.number]]
    # The fake runs all of them at once.
    assert late or harness.policy is None
    for completion in late:
        expected = harness.expected(prompt, completion.ids.tolist(), temperature=1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=harness.log_probability_tolerance)


def test_a_drained_pause_waits_and_the_others_do_not(harness: Harness) -> None:
    async def scenario() -> tuple[bool, bool]:
        request = begun(harness)
        await until_sampled(harness, request, num_tokens=20)
        await harness.engine.pause()
        late = asyncio.create_task(harness.engine.generate(make_request()))
        done, _ = await asyncio.wait({request, late}, timeout=0.2)
        await harness.engine.resume()
        await asyncio.gather(request, late)
        return request in done, late in done

    assert harness.run(scenario()) == (harness.landing == "drain", False)


def test_a_cancelled_caller_takes_its_request_along(harness: Harness) -> None:
    async def scenario() -> None:
        request = begun(harness)
        await until_sampled(harness, request, num_tokens=5)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        # A request after it in the queue has an answer of a single token, so that the engine has read of the end.
        await harness.engine.generate(make_request(max_tokens=1, num_samples=1))
        assert await num_running(harness.engine) == 0

    harness.run(scenario())


def test_a_caller_that_is_cancelled_during_a_pause_leaves_nothing(harness: Harness) -> None:
    async def scenario() -> None:
        await harness.engine.pause()
        request = begun(harness)
        await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await harness.engine.resume()
        await harness.engine.generate(make_request(max_tokens=1, num_samples=1))
        assert await num_running(harness.engine) == 0

    harness.run(scenario())


async def num_running(engine: Engine) -> int:
    """Requests that the engine still works on; of vLLM's core process, asked of itself, whether there are any."""
    if isinstance(engine, FakeEngine):
        return engine.num_running
    assert isinstance(engine, VllmEngine)
    llm = engine._llm
    assert llm is not None
    num_known: int = llm.get_num_unfinished_requests()
    return num_known + int(await llm.engine_core.call_utility_async("has_work"))  # type: ignore[attr-defined]


# --- together -------------------------------------------------------------------------------------------------------


def batch(num_requests: int) -> list[SampleRequest]:
    """Requests of different lengths, two of which share a prompt."""
    prompts = [[65 + n] * (1 + 11 * (n % 5)) for n in range(num_requests - 1)]
    return [
        make_request(prompt, id=f"g{n}", seed=n, max_tokens=8 + n % 3)
        for n, prompt in enumerate([*prompts, prompts[0]])
    ]


def bits(groups: Sequence[Sequence[Completion]]) -> list[tuple[bytes, bytes]]:
    return [(c.ids.tobytes(), c.logprobs.tobytes()) for group in groups for c in group]


# vLLM decodes 32 sequences together: 24 fit, 120 do not.
@pytest.mark.parametrize("num_requests", [6, 30])
def test_requests_together_repeat_bit_for_bit(harness: Harness, num_requests: int) -> None:
    requests = batch(num_requests)
    first, second = (harness.run(harness.engine.generate_together(requests)) for _ in range(2))

    assert [len(group) for group in first] == [4] * num_requests
    assert bits(first) == bits(second)
    for request, group in zip(requests, first, strict=True):
        for completion in group:
            assert [(run.version, run.num_tokens) for run in completion.versions] == [
                (harness.number, request.max_tokens)
            ]
            expected = harness.expected(request.prompt_ids.tolist(), completion.ids.tolist(), temperature=1.0)
            np.testing.assert_allclose(completion.logprobs, expected, atol=harness.log_probability_tolerance)


def test_vllm_has_all_of_a_batch_before_it_begins(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(harness.engine, VllmEngine):
        pytest.skip("of vLLM's own pause")
    llm = harness.engine._llm
    assert llm is not None
    resume, seen = llm.resume_generation, []

    async def look_and_resume() -> None:
        seen.append((await llm.is_paused(), llm.get_num_unfinished_requests()))
        await resume()

    monkeypatch.setattr(llm, "resume_generation", look_and_resume)
    harness.run(harness.engine.generate_together(batch(6)))

    assert seen == [(True, 24)]


def test_other_work_in_between_changes_no_bit(harness: Harness) -> None:
    requests = batch(6)
    first = harness.run(harness.engine.generate_together(requests))
    harness.run(harness.engine.generate(make_request([65] * 12, num_samples=5, max_tokens=30)))
    second = harness.run(harness.engine.generate_together(requests))

    assert bits(first) == bits(second)


def test_together_and_alone_sample_the_same_tokens(harness: Harness) -> None:
    requests = batch(4)
    together = harness.run(harness.engine.generate_together(requests))
    alone = [harness.run(harness.engine.generate(request)) for request in requests]

    assert [c.ids.tolist() for group in together for c in group] == [c.ids.tolist() for group in alone for c in group]


def test_nothing_together_is_nothing(harness: Harness) -> None:
    assert harness.run(harness.engine.generate_together([])) == ()


def test_together_is_for_an_engine_that_does_nothing_else(harness: Harness) -> None:
    async def scenario() -> None:
        request = begun(harness, num_samples=1)
        await until_sampled(harness, request, num_tokens=5)
        with pytest.raises(AssertionError, match="1 completions run beside"):
            await harness.engine.generate_together(batch(2))
        await request
        await harness.engine.pause()
        with pytest.raises(AssertionError, match="while paused"):
            await harness.engine.generate_together(batch(2))
        await harness.engine.resume()

    harness.run(scenario())


def test_one_mistaken_request_stops_all_that_were_to_run_together(harness: Harness) -> None:
    with pytest.raises(DataError, match="prompt"):
        harness.run(harness.engine.generate_together([*batch(2), make_request([])]))
    assert harness.run(num_running(harness.engine)) == 0


def test_a_cancelled_batch_leaves_an_engine_that_works(harness: Harness) -> None:
    async def scenario() -> int:
        long = [make_request([65 + n], id=f"g{n}", max_tokens=200) for n in range(4)]
        together = asyncio.create_task(harness.engine.generate_together(long))
        await until_sampled(harness, together, num_tokens=5)
        together.cancel()
        with pytest.raises(asyncio.CancelledError):
            await together
        await harness.engine.generate(make_request(max_tokens=1, num_samples=1))
        return await num_running(harness.engine)

    assert harness.run(scenario()) == 0


# --- the order of publications --------------------------------------------------------------------------------------


def test_the_version_that_is_held_may_be_published_again(harness: Harness) -> None:
    version = harness.run(update(harness))

    async def scenario() -> WeightVersion:
        await harness.engine.pause()
        held = await harness.engine.update_weights(harness.same_publication())
        await harness.engine.resume()
        return held

    assert harness.run(scenario()) == harness.engine.version == version
    prompt = [1, 2, 3]
    (completion,) = harness.run(harness.engine.generate(make_request(prompt, num_samples=1)))
    expected = harness.expected(prompt, completion.ids.tolist(), temperature=1.0)
    np.testing.assert_allclose(completion.logprobs, expected, atol=harness.log_probability_tolerance)


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
