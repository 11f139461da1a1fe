"""Every fault of a publication stops the real engine before a token is sampled; a good one goes through after it."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fourstroke.config import EngineConfig, load_config
from fourstroke.engines.vllm import VllmEngine
from fourstroke.errors import MismatchError, PublicationError
from fourstroke.orchestration.canary import CanaryWatch
from fourstroke.testing.policy import TinyPolicy
from fourstroke.testing.run import tiny_model
from fourstroke.types import Canary, Completion, Publication, SampleRequest, TensorEntry, WeightVersion
from fourstroke.weights.manifest import version_digest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="missing: vllm"),
    # Third parties' warnings while vLLM is imported, 2026-11-30.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]

UP, DOWN = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight"


@dataclass(frozen=True)
class Harness:
    engine: VllmEngine
    runner: asyncio.Runner
    policy: TinyPolicy


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("faults")
    model_path = tiny_model(folder / "model")
    config = EngineConfig(dtype="float32", max_model_len=64, max_num_seqs=8, kv_cache_gib=0.25, num_threads=1)
    engine = VllmEngine(config, model_path, seed=0, log_path=folder / "engine.log")
    policy = TinyPolicy(model_path, publication_path=folder / "weights")
    with asyncio.Runner() as runner:
        try:
            runner.run(engine.start())
            yield Harness(engine, runner, policy)
        finally:
            runner.run(engine.close())
            policy.close()


def entry_of(publication: Publication, name: str) -> TensorEntry:
    (entry,) = (entry for entry in publication.tensors if entry.name == name)
    return entry


def rewrite(publication: Publication, name: str, data: bytes) -> None:
    entry = entry_of(publication, name)
    with Path(publication.path).open("r+b") as file:
        file.seek(entry.offset)
        file.write(data[: entry.size_bytes])


def bytes_of(publication: Publication, name: str) -> bytes:
    entry = entry_of(publication, name)
    return Path(publication.path).read_bytes()[entry.offset : entry.offset + entry.size_bytes]


def stale(policy: TinyPolicy, number: int) -> Publication:
    """One tensor's bytes are those of the publication before."""
    old = bytes_of(policy.publish(number), UP)
    policy.nudge(number)
    publication = policy.publish(number)
    rewrite(publication, UP, old)
    return publication


def swapped(policy: TinyPolicy, number: int) -> Publication:
    """Two tensors of one shape have each other's bytes."""
    publication = policy.publish(number)
    up, down = bytes_of(publication, UP), bytes_of(publication, DOWN)
    rewrite(publication, UP, down)
    rewrite(publication, DOWN, up)
    return publication


def half_written(policy: TinyPolicy, number: int) -> Publication:
    """The second half of a tensor never came."""
    publication = policy.publish(number)
    data = bytes_of(publication, UP)
    rewrite(publication, UP, data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    return publication


def with_entries(publication: Publication, entries: tuple[TensorEntry, ...]) -> Publication:
    version = msgspec.structs.replace(publication.version, digest=version_digest(entries))
    return msgspec.structs.replace(publication, tensors=entries, version=version)


def dropped(policy: TinyPolicy, number: int) -> Publication:
    publication = policy.publish(number)
    return with_entries(publication, tuple(entry for entry in publication.tensors if entry.name != UP))


def renamed(policy: TinyPolicy, number: int) -> Publication:
    publication = policy.publish(number)
    return with_entries(
        publication,
        tuple(msgspec.structs.replace(e, name=f"module.{e.name}") if e.name == UP else e for e in publication.tensors),
    )


def older(policy: TinyPolicy, number: int) -> Publication:
    return policy.publish(number - 1)


def dead_incarnation(policy: TinyPolicy, number: int) -> Publication:
    publication = policy.publish(number)
    version = msgspec.structs.replace(publication.version, incarnation=-1)
    return msgspec.structs.replace(publication, version=version)


FAULTS: list[tuple[Callable[[TinyPolicy, int], Publication], str]] = [
    (stale, f"tensor {UP} arrived with digest"),
    (swapped, r"tensor model\.layers\.[01]\.self_attn\.k_proj\.weight arrived with digest"),
    (half_written, f"tensor {UP} arrived with digest"),
    (dropped, f"tensor {UP} is missing"),
    (renamed, f"tensor {UP} is missing"),
    (older, "does not follow version"),
    (dead_incarnation, "is of incarnation -1"),
]


async def offer(engine: VllmEngine, publication: Publication) -> WeightVersion:
    await engine.pause()
    try:
        return await engine.update_weights(publication)
    finally:
        await engine.resume()


async def sample(engine: VllmEngine) -> Completion:
    request = SampleRequest(
        id="g0",
        prompt_ids=np.array([5, 6, 7], dtype=np.int32),
        num_samples=1,
        max_tokens=16,
        temperature=1.0,
        stop_ids=(),
        seed=1,
    )
    (completion,) = await engine.generate(request)
    return completion


@pytest.mark.parametrize(("fault", "sentence"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_named_and_nothing_is_loaded(
    harness: Harness, fault: Callable[[TinyPolicy, int], Publication], sentence: str
) -> None:
    engine, runner, held = harness.engine, harness.runner, harness.engine.version
    before = runner.run(sample(engine))

    with pytest.raises(PublicationError, match=sentence):
        runner.run(offer(engine, fault(harness.policy, held.number + 1)))

    assert engine.version == held
    after = runner.run(sample(engine))
    assert after.ids.tolist() == before.ids.tolist()
    assert after.logprobs.tolist() == before.logprobs.tolist()


def test_after_a_fault_a_good_publication_lands(harness: Harness) -> None:
    engine, runner, number = harness.engine, harness.runner, harness.engine.version.number + 1
    with pytest.raises(PublicationError):
        runner.run(offer(engine, dropped(harness.policy, number)))
    harness.policy.nudge(99)

    assert runner.run(offer(engine, harness.policy.publish(number))).number == number

    completion = runner.run(sample(engine))
    expected = harness.policy.logprobs([5, 6, 7], completion.ids.tolist(), temperature=1.0)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


# --- what arrives whole and is wrong: the canary's to find -----------------------------------------------------------


class Mistaken:
    """A trainer that writes other weights than it computes with, under digests that fit them."""

    def __init__(self, policy: TinyPolicy, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        self._policy, self._change = policy, change

    async def canary(self) -> Canary:
        ids_BT = np.array([[5, 6, 7, 8, 9, 10], [200, 100, 50, 25, 12, 6]], dtype=np.int32)
        rows = [self._policy.logprobs(row[:1], row[1:], temperature=1.0) for row in ids_BT.tolist()]
        return Canary(ids_BT=ids_BT, logprobs_BT=np.stack(rows).astype(np.float32))

    def publish(self, number: int) -> Publication:
        weights = {name: tensor.clone() for name, tensor in self._policy.model.state_dict().items()}
        self._change(weights)
        tensors = ((name, weights[name]) for name in self._policy.shapes)
        return self._policy.publisher.publish(number, tensors, incarnation=0)


def nothing(_: dict[str, torch.Tensor]) -> None:
    """As it should be."""


def swapped_layers(weights: dict[str, torch.Tensor]) -> None:
    weights[UP], weights[DOWN] = weights[DOWN], weights[UP]


def zeroed(weights: dict[str, torch.Tensor]) -> None:
    weights[UP].zero_()


def transposed(weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].T.contiguous()


def scaled(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] *= 1.01


def noisy(weights: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=1e-3 * float(tensor.std()))


CHANGES = [nothing, swapped_layers, zeroed, transposed, scaled, noisy]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_weights_that_arrive_whole_and_are_others_are_found(
    harness: Harness, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    watch = CanaryWatch(load_config({"engine": {"dtype": "float32"}, "trainer": {"compute_dtype": "float32"}}))
    engine, policy, number = harness.engine, harness.policy, harness.engine.version.number + 1
    trainer: Any = Mistaken(policy, change)

    async def scenario() -> None:
        await offer(engine, Mistaken(policy, nothing).publish(number))
        await watch.measure_floor(trainer, [engine])
        policy.nudge(number)
        assert await offer(engine, trainer.publish(number + 1)) == engine.version
        await watch.expect(trainer)
        await watch.prove(engine)

    if change is nothing:
        harness.runner.run(scenario())
        assert watch.reading is not None
        assert watch.reading < 3e-5
    else:
        with pytest.raises(MismatchError, match=r"^vllm-0 took weights .* whole and computes with others"):
            harness.runner.run(scenario())


def test_the_engine_does_not_look_into_shared_memory_afterwards(harness: Harness) -> None:
    """The next publication is written while the engine samples from the last."""
    engine, runner, number = harness.engine, harness.runner, harness.engine.version.number + 1
    publication = harness.policy.publish(number)
    runner.run(offer(engine, publication))
    before = runner.run(sample(engine))

    file = Path(publication.path)
    file.write_bytes(b"\xff" * file.stat().st_size)

    after = runner.run(sample(engine))
    assert after.ids.tolist() == before.ids.tolist()
    assert after.logprobs.tolist() == before.logprobs.tolist()


def test_a_publication_that_is_held_already_changes_nothing(harness: Harness) -> None:
    """A fleet publishes again to all engines after a replacement; what it says must still be whole."""
    engine, runner, number = harness.engine, harness.runner, harness.engine.version.number + 1
    publication = harness.policy.publish(number)
    runner.run(offer(engine, publication))
    before = runner.run(sample(engine))

    assert runner.run(offer(engine, publication)) == publication.version

    after = runner.run(sample(engine))
    assert after.ids.tolist() == before.ids.tolist()
    assert after.logprobs.tolist() == before.logprobs.tolist()
    assert after.versions == before.versions


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_torn_publication_stops_a_whole_run_which_then_goes_on(place: Any) -> None:
    running = place.train(num_steps=4, variables={"SABOTAGE_TEAR": "3"})

    code, _, errors = running.end()

    assert code == 6
    assert re.fullmatch(
        r"error: vllm-0: publication 3: tensor \S+ arrived with digest \w+, it was published with \w+\n", errors
    )
    audit = place.audit()
    assert (audit.trained, audit.balanced) == (8, True)
    code, _, errors = place.resume().end()
    assert code == 0, errors
    assert place.audit().trained == 16
