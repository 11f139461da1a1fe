"""A fake engine: honest tokens, log-probabilities and versions from a toy distribution, in virtual time.

    logits(ids so far) + shift by version -> softmax at the temperature -> token by (seed, member, position, version)

Like the real one it holds requests while paused and goes on with them under the new weights, or drains them first, as
its landing says. Without a ``logits_fn`` the distribution depends on the last token alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fourstroke.engines.parts import merge_runs
from fourstroke.engines.vllm import CHECKPOINT
from fourstroke.errors import DataError, EngineDiedError, PublicationError
from fourstroke.types import Canary, Completion, Publication, SampleRequest, StopReason, VersionRun, WeightVersion

LogitsFn = Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEngineSettings:
    """How a fake engine behaves.

    Attributes:
        vocab_size: Token ids are below it; a ``logits_fn`` returns that many.
        max_model_len: Most tokens of prompt and reply together.
        token_s: Seconds that a token takes.
        dies_at_request: Number (from 0) of the request in which the engine dies, or None.
        shapes: With names and shapes given, publications are verified by the real receiver.
        landing: What an update does to requests that run, as ``EngineConfig.landing``. With ``keep_kv`` their further
            tokens come of a distribution between that of the version they began under and the new one. ``keep`` and
            ``abort`` are alike here: a fake computes everything again for each token.
    """

    vocab_size: int = 32
    max_model_len: int = 1024
    token_s: float = 0.01
    dies_at_request: int | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    landing: Literal["keep", "keep_kv", "drain", "abort"] = "keep"


class FakeEngine:
    """Satisfies ``types.Engine``.

    Args:
        settings: How it behaves.
        logits_fn: float64 [V] of the ids so far, prompt included; None for a distribution of its own.
        name: Name in spans.
        held: The version that it starts under; ``engines.vllm.REPLACEMENT`` in one that joins a run under way.

    Example:
        >>> request = SampleRequest(id="g1", prompt_ids=np.array([1, 2], np.int32), num_samples=2, max_tokens=3,
        ...                         temperature=1.0, stop_ids=(), seed=7)
        >>> async def sample() -> list[int]:
        ...     engine = FakeEngine()
        ...     await engine.start()
        ...     return [len(completion.ids) for completion in await engine.generate(request)]
        >>> asyncio.run(sample())
        [3, 3]
    """

    def __init__(
        self,
        settings: FakeEngineSettings | None = None,
        *,
        logits_fn: LogitsFn | None = None,
        name: str = "fake-0",
        held: WeightVersion = CHECKPOINT,
    ) -> None:
        self._settings = settings or FakeEngineSettings()
        self._logits_fn = logits_fn or self._own_logits
        self._name = name
        self._version = held
        self._running = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_running = 0
        self._obituary = f"{name} was not started"
        self._num_requests = 0

    @property
    def name(self) -> str:
        """Name of this engine in spans."""
        return self._name

    @property
    def version(self) -> WeightVersion:
        """The weights that a token is sampled under now."""
        return self._version

    @property
    def num_running(self) -> int:
        """Completions that are being sampled, those held by a pause included."""
        return self._num_running

    async def start(self) -> None:
        """Be ready, under the version that it was made with."""
        self._obituary = ""
        self._running.set()

    async def generate(self, request: SampleRequest) -> tuple[Completion, ...]:
        """Sample; members go side by side.

        Raises:
            DataError: A token id lies outside the vocabulary, or prompt and reply do not fit the context.
            EngineDiedError: The engine is dead, or dies before it answers.
        """
        self._check_alive()
        self._check_request(request)
        number, self._num_requests = self._num_requests, self._num_requests + 1
        if number == self._settings.dies_at_request:
            self.kill()
        return tuple(await asyncio.gather(*(self._run(request, member) for member in range(request.num_samples))))

    async def generate_together(self, requests: Sequence[SampleRequest]) -> tuple[tuple[Completion, ...], ...]:
        """Sample all requests; what is sampled depends on them and the weights alone. Legal only while nothing runs.

        Raises:
            DataError, EngineDiedError: As ``generate``.
        """
        self._check_alive()
        assert not self._num_running, f"{self._name}: {self._num_running} completions run beside requests together"
        assert self._running.is_set(), f"{self._name}: requests together while paused"
        for request in requests:
            self._check_request(request)
        return tuple(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def pause(self) -> None:
        """Hold all requests before their next token; or, where it drains, new ones alone, until the others are done."""
        self._check_alive()
        self._running.clear()
        if self._settings.landing == "drain":
            await self._idle.wait()
            self._check_alive()

    async def update_weights(self, publication: Publication) -> WeightVersion:
        """Take over a publication's version, unless it is held already. Legal only while paused.

        Raises:
            PublicationError: The version does not follow, or (with shapes given) the publication does not arrive whole.
        """
        self._check_alive()
        assert not self._running.is_set(), f"{self._name}: update_weights while requests run"
        version = publication.version
        if version == self._version:
            return version
        if self._settings.shapes is not None:
            self._verify(publication, shapes=self._settings.shapes)
        elif not _follows(version, held=self._version):
            raise PublicationError(f"publication {version.number} does not follow version {self._version.number}")
        self._version = version
        return version

    async def resume(self) -> None:
        """Let requests run again."""
        self._check_alive()
        self._running.set()

    async def score(self, ids_BT: np.ndarray) -> Canary:
        """What the distribution of the version held gives to each token but the first of each row."""
        self._check_alive()
        return self.scored(ids_BT, version=self._version.number)

    def scored(self, ids_BT: np.ndarray, *, version: int) -> Canary:
        """The same under any version: what a trainer of these weights must say."""
        logprobs = [
            [log_softmax(self.logits(row[:end], version))[row[end]] for end in range(1, len(row))]
            for row in ids_BT.tolist()
        ]
        return Canary(ids_BT=ids_BT, logprobs_BT=np.array(logprobs, dtype=np.float32))

    async def check_health(self) -> None:
        """Return if the engine is alive, else raise ``EngineDiedError``."""
        self._check_alive()

    async def close(self) -> None:
        """End all requests."""
        self._end(f"{self._name} was closed")

    def kill(self) -> None:
        """Die now, as a killed process does: every request that waits fails."""
        self._end(f"{self._name}: process 4711 ended with signal 9")

    def _end(self, obituary: str) -> None:
        self._obituary = self._obituary or obituary
        self._running.set()
        self._idle.set()

    def _check_alive(self) -> None:
        if self._obituary:
            raise EngineDiedError(self._obituary)

    def _check_request(self, request: SampleRequest) -> None:
        ids, settings = request.prompt_ids, self._settings
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= settings.vocab_size:
            raise DataError(
                f"request {request.id} has no prompt, or a token id outside the vocabulary of {settings.vocab_size}"
            )
        if len(ids) + request.max_tokens > settings.max_model_len:
            raise DataError(f"request {request.id} does not fit the context of {settings.max_model_len} tokens")

    def _verify(self, publication: Publication, *, shapes: Mapping[str, tuple[int, ...]]) -> None:
        from fourstroke.weights.receive import Receiver

        Receiver(shapes, dtype=publication.tensors[0].dtype).receive(publication, held=self._version)

    async def _run(self, request: SampleRequest, member: int) -> Completion:
        while not self._running.is_set():
            # A pause may begin anew before this task runs.
            await self._running.wait()
        self._num_running += 1
        self._idle.clear()
        try:
            return await self._sample(request, member)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def _sample(self, request: SampleRequest, member: int) -> Completion:
        prompt, began = request.prompt_ids.tolist(), self._version.number
        ids: list[int] = []
        logprobs: list[float] = []
        runs: list[VersionRun] = []
        stop = StopReason.LENGTH
        while len(ids) < request.max_tokens:
            await asyncio.sleep(self._settings.token_s)
            if self._settings.landing != "drain":
                await self._running.wait()
            self._check_alive()
            version = self._version.number
            logits_V = self.logits([*prompt, *ids], version)
            if self._settings.landing == "keep_kv":
                logits_V = (logits_V + self.logits([*prompt, *ids], began)) / 2
            logprobs_V = log_softmax(logits_V / request.temperature)
            generator = np.random.default_rng([request.seed, member, len(ids), version])
            token = int(generator.choice(len(logprobs_V), p=np.exp(logprobs_V)))
            ids.append(token)
            logprobs.append(float(logprobs_V[token]))
            runs.append(VersionRun(version=version, num_tokens=1))
            if token in request.stop_ids:
                stop = StopReason.FINISHED
                break
        return Completion(
            ids=np.array(ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=merge_runs(runs),
            stop=stop,
            engine=self._name,
        )

    def logits(self, ids: Sequence[int], version: int) -> np.ndarray:
        """float64 [V]: what is sampled from after ``ids``, before the temperature, under a version of the weights."""
        logits_V = np.asarray(self._logits_fn(ids), dtype=np.float64)
        assert logits_V.shape == (self._settings.vocab_size,), logits_V.shape
        if version == 0:
            return logits_V
        shift_V: np.ndarray = np.random.default_rng(version).standard_normal(len(logits_V))
        return logits_V + 0.1 * shift_V

    def _own_logits(self, ids: Sequence[int]) -> np.ndarray:
        return np.random.default_rng(ids[-1]).standard_normal(self._settings.vocab_size)


def _follows(version: WeightVersion, *, held: WeightVersion) -> bool:
    """The real receiver's rule: the next number, or any of a newer incarnation."""
    if version.incarnation == held.incarnation:
        return version.number == held.number + 1
    return version.incarnation > held.incarnation


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    """float64 [V]: logarithm of the softmax.

    Example:
        >>> np.exp(log_softmax(np.array([0.0, np.log(3.0)]))).round(2).tolist()
        [0.25, 0.75]
    """
    shifted_V = logits_V - logits_V.max()
    normalised_V: np.ndarray = shifted_V - np.log(np.exp(shifted_V).sum())
    return normalised_V
