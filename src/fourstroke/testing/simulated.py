"""Engine, worker and trainer of a simulated run: fakes in processes of their own, behind a network with faults.

    driver: SimulatedEngine   SimulatedTrainer   SimulatedWorker      what the driver holds, behind the protocols
                |                  |                  |               network: slow, lost, twice, deaths
    inside:  FakeEngine        FakeTrainer        router, rollout --network--> FakeEngine
                '---- reads ---- shared memory <--'

Everything is light: a token is only the version that it was sampled under, a payload only a reference. What was truly
sampled is kept apart from what the records say.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import msgspec
import numpy as np

from fourstroke.config import RunConfig
from fourstroke.engines.parts import merge_runs
from fourstroke.engines.router import Router
from fourstroke.engines.vllm import CHECKPOINT, REPLACEMENT
from fourstroke.errors import ActorDiedError, EngineDiedError, PublicationError
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.testing.network import Network, Process
from fourstroke.testing.trainer import FakeTrainer
from fourstroke.types import (
    Assignment,
    BatchRecord,
    Canary,
    Completion,
    Engine,
    EpisodeRecord,
    GroupRecord,
    Microbatch,
    PayloadReference,
    Publication,
    RefusedGroup,
    RowShape,
    SampleRequest,
    Scored,
    StepStats,
    StopReason,
    Unscored,
    VersionRun,
    Wait,
    WeightVersion,
)

T = TypeVar("T")

_PROMPT_IDS = np.array([1], dtype=np.int32)
_GRADER = "simulated@0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds that things take at most, each time anew.

    Attributes:
        start_s: A process to start.
        token_s: A token, always as long.
        grade_s: A group to be graded.
        load_s: An engine to read a publication.
        verb_s: A verb of the trainer, always as long.
    """

    start_s: float
    token_s: float
    grade_s: float
    load_s: float
    verb_s: float


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """What the processes of one driver's life share, and what they tell of themselves.

    Attributes:
        config: The run's.
        random: Decides latencies, lengths and scores, asked in the order of events.
        latencies: How long things take.
        network: Carries all calls.
        unscored: Probability that an episode gets no score.
        refused: Ids of the tasks that do not fit.
        may_serve: Told of each token that an engine samples: request and version.
        keep_late: Takes a record that arrived a second time.
        shared_memory: Digest of what lies at each path.
        truth: For each payload written, the weights of each member's tokens.
        processes: All processes, in the order of their start.
    """

    config: RunConfig
    random: Random
    latencies: Latencies
    network: Network
    unscored: float
    refused: frozenset[str]
    may_serve: Callable[[SampleRequest, WeightVersion], None]
    keep_late: Callable[[GroupRecord], None]
    shared_memory: dict[str, str] = field(default_factory=dict)
    truth: dict[tuple[int, int], tuple[tuple[WeightVersion, ...], ...]] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)

    def process(self, name: str, *, died: Any, on_death: Callable[[], None]) -> Process:
        """A new process."""
        process = Process(name, died, on_death)
        self.processes.append(process)
        return process

    async def nap(self, longest_s: float) -> None:
        """Take some time, up to ``longest_s``."""
        await asyncio.sleep(longest_s * self.random.random())


def digest_of(trained: Sequence[Sequence[str]]) -> str:
    """Digest of the weights that these updates led to.

    Example:
        >>> digest_of([["a"], ["b"]]) == digest_of([["a", "b"]])
        False
    """
    return hashlib.blake2b(msgspec.json.encode(trained), digest_size=8).hexdigest()


# --- engines --------------------------------------------------------------------------------------------------------


class _EngineInside(FakeEngine):
    """A fake engine that samples versions alone, and reads publications from the shared memory.

    Attributes:
        sampled: The weights of each completion's tokens, by request and member.
    """

    def __init__(self, around: Surroundings, *, name: str, held: WeightVersion) -> None:
        settings = FakeEngineSettings(token_s=around.latencies.token_s, landing=around.config.engine.landing)
        super().__init__(settings, name=name, held=held)
        self._around = around
        self.sampled: dict[tuple[str, int], tuple[WeightVersion, ...]] = {}

    async def start(self) -> None:
        await self._around.nap(self._around.latencies.start_s)
        await super().start()

    async def update_weights(self, publication: Publication) -> WeightVersion:
        if publication.version != self.version:
            self._check_memory(publication)
            await self._around.nap(self._around.latencies.load_s)
            self._check_memory(publication)
        return await super().update_weights(publication)

    def _check_memory(self, publication: Publication) -> None:
        found = self._around.shared_memory.get(publication.path, "nothing")
        if found != publication.version.digest:
            raise PublicationError(f"{self.name} finds {found} at {publication.path} in place of {publication.version}")

    async def _sample(self, request: SampleRequest, member: int) -> Completion:
        num_tokens = 1 + (request.seed + member) % request.max_tokens
        versions: list[WeightVersion] = []
        for _ in range(num_tokens):
            await asyncio.sleep(self._settings.token_s)
            while self._settings.landing != "drain" and not self._running.is_set():
                await self._running.wait()
            self._check_alive()
            self._around.may_serve(request, self._version)
            versions.append(self._version)
        self.sampled[request.id, member] = tuple(versions)
        return Completion(
            ids=np.zeros(num_tokens, dtype=np.int32),
            logprobs=np.zeros(num_tokens, dtype=np.float32),
            versions=merge_runs([VersionRun(version=version.number, num_tokens=1) for version in versions]),
            stop=StopReason.LENGTH if num_tokens == request.max_tokens else StopReason.FINISHED,
            engine=self.name,
        )


class SimulatedEngine:
    """An engine as driver and workers hold it; satisfies ``types.Engine``."""

    def __init__(self, around: Surroundings, *, name: str, is_replacement: bool) -> None:
        self._network = around.network
        self._inside = _EngineInside(around, name=name, held=REPLACEMENT if is_replacement else CHECKPOINT)
        self.process = around.process(name, died=EngineDiedError, on_death=self._inside.kill)
        self._version: WeightVersion | None = None

    @property
    def name(self) -> str:
        """Name of this engine."""
        return self.process.name

    @property
    def version(self) -> WeightVersion:
        """The weights that it last said it holds."""
        assert self._version is not None, f"{self.name} has not started"
        return self._version

    def sampled(self, request: str, member: int) -> tuple[WeightVersion, ...]:
        """The weights that a completion's tokens were truly sampled under."""
        return self._inside.sampled[request, member]

    async def start(self) -> None:
        """Start the process."""
        await self._call("start", self._inside.start)
        self._version = self._inside.version

    async def generate(self, request: SampleRequest) -> tuple[Completion, ...]:
        """Sample."""
        return await self._call("generate", lambda: self._inside.generate(request), is_control=False)

    async def generate_together(self, requests: Sequence[SampleRequest]) -> tuple[tuple[Completion, ...], ...]:
        """Sample all."""
        return await self._network.call(
            self.process, "generate", lambda: self._inside.generate_together(requests), may_outlive_caller=False
        )

    async def pause(self) -> None:
        """Hold requests."""
        await self._call("pause", self._inside.pause)

    async def update_weights(self, publication: Publication) -> WeightVersion:
        """Load a publication."""
        self._version = await self._call("update_weights", lambda: self._inside.update_weights(publication))
        return self._version

    async def resume(self) -> None:
        """Let requests run again."""
        await self._call("resume", self._inside.resume)

    async def score(self, ids_BT: np.ndarray) -> Canary:
        """Score fixed tokens."""
        return await self._call("score", lambda: self._inside.score(ids_BT))

    async def check_health(self) -> None:
        """Return if it lives."""
        await self._call("check_health", self._inside.check_health, is_control=False)

    async def close(self) -> None:
        """End the process."""
        self._network.check()
        self.process.kill("closed")

    async def _call(self, verb: str, work: Callable[[], Awaitable[T]], *, is_control: bool = True) -> T:
        return await self._network.call(self.process, verb, work, is_ordered=is_control)


# --- workers --------------------------------------------------------------------------------------------------------


class SimulatedWorker:
    """A rollout worker; satisfies ``types.Worker``. Samples through the real router; scores are all different."""

    def __init__(self, around: Surroundings, *, name: str, number: int) -> None:
        self._around = around
        self._router = Router()
        self._engines: dict[str, SimulatedEngine] = {}
        self._number = number
        self._num_written = 0
        self._num_requests = 0
        self.process = around.process(name, died=ActorDiedError, on_death=lambda: None)

    @property
    def name(self) -> str:
        """Name of this worker."""
        return self.process.name

    async def start(self) -> None:
        """Start the process."""
        await self._call("start", lambda: self._around.nap(self._around.latencies.start_s))

    async def route(self, engines: Sequence[Engine]) -> None:
        """From now on sample on these engines alone."""
        await self._call("route", lambda: self._route(engines))

    async def run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        """Sample, grade and store groups."""
        return await self._around.network.call(
            self.process,
            f"run {', '.join(assignment.name for assignment in assignments)}",
            lambda: self._run(assignments, is_together=is_together),
            # Batches that repeat bit for bit must have an engine for themselves.
            on_second=None if is_together else self._keep_late,
            may_outlive_caller=not is_together,
        )

    async def check_health(self) -> tuple[Wait, ...]:
        """Nothing, while it lives."""
        return await self._around.network.call(self.process, "check_health", self._waits)

    async def close(self) -> None:
        """End the process."""
        self._around.network.check()
        self.process.kill("closed")

    async def _call(self, verb: str, work: Callable[[], Awaitable[None]]) -> None:
        await self._around.network.call(self.process, verb, work, is_ordered=True)

    async def _route(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            assert isinstance(engine, SimulatedEngine), engine
            self._engines[engine.name] = engine
        self._router.route(engines)

    async def _waits(self) -> tuple[Wait, ...]:
        return ()

    def _keep_late(self, results: tuple[GroupRecord | RefusedGroup, ...]) -> None:
        for result in results:
            if isinstance(result, GroupRecord):
                self._around.keep_late(result)

    async def _run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        refused = self._around.refused
        requests = [self._request(one) for one in assignments if one.task.id not in refused]
        if is_together:
            answers = list(await self._router.generate_together(requests)) if requests else []
        else:
            answers = [await self._router.generate(request) for request in requests]
        await self._around.nap(self._around.latencies.grade_s)
        sampled = iter(zip(requests, answers, strict=True))
        return tuple(
            RefusedGroup(key=one.draw.key, reason="does_not_fit", detail="as the seed says")
            if one.task.id in refused
            else self._record(one, *next(sampled))
            for one in assignments
        )

    def _request(self, one: Assignment) -> SampleRequest:
        self._num_requests += 1
        return SampleRequest(
            id=f"{one.draw.key}.r{one.incarnation}.a{one.attempt}.{self.name}.{self._num_requests}",
            prompt_ids=_PROMPT_IDS,
            num_samples=one.num_samples,
            max_tokens=self._around.config.rollout.max_tokens,
            temperature=1.0,
            stop_ids=(),
            seed=one.draw.seed,
        )

    def _record(self, one: Assignment, request: SampleRequest, answer: Sequence[Completion]) -> GroupRecord:
        self._num_written += 1
        reference = PayloadReference(segment=self._number, offset=self._num_written, length=1, digest="0" * 16)
        self._around.truth[reference.segment, reference.offset] = tuple(
            self._engines[completion.engine].sampled(request.id, member) for member, completion in enumerate(answer)
        )
        return GroupRecord(
            draw=one.draw,
            admitted_version=one.admitted_version,
            incarnation=one.incarnation,
            attempt=one.attempt,
            episodes=tuple(self._episode(member, completion) for member, completion in enumerate(answer)),
            reference=reference,
        )

    def _episode(self, member: int, completion: Completion) -> EpisodeRecord:
        num_tokens = len(completion.ids)
        verdict: Scored | Unscored = Scored(score=float(member), components={}, reason="", grader=_GRADER, cost_s=0.0)
        if self._around.random.random() < self._around.unscored:
            verdict = Unscored(reason="timeout", detail="as the seed says", grader=_GRADER, cost_s=0.0)
        return EpisodeRecord(
            member=member,
            stop=completion.stop,
            verdict=verdict,
            num_sampled_tokens=num_tokens,
            versions=completion.versions,
            rows=(RowShape(num_tokens=num_tokens + 1, num_loss_tokens=num_tokens, num_shared_tokens=0),),
            failure="",
        )


# --- the trainer ----------------------------------------------------------------------------------------------------


class _TrainerInside(FakeTrainer):
    """A fake trainer whose publications lie in the shared memory, and say what its weights were made of."""

    def __init__(self, around: Surroundings, *, path: str) -> None:
        super().__init__(verb_s=around.latencies.verb_s)
        self._around = around
        self._path = path

    async def publish(self, number: int, *, incarnation: int) -> Publication:
        await super().publish(number, incarnation=incarnation)
        digest = digest_of(self.trained[:-1])
        self._around.shared_memory[self._path] = digest
        version = WeightVersion(incarnation=incarnation, number=number, digest=digest)
        return Publication(version=version, path=self._path, size_bytes=0, tensors=())


class SimulatedTrainer:
    """The trainer as the driver holds it; satisfies ``types.Trainer``."""

    def __init__(self, around: Surroundings, *, name: str, path: str) -> None:
        self._around = around
        self._path = path
        self.inside = _TrainerInside(around, path=path)
        self.process = around.process(name, died=ActorDiedError, on_death=self.inside.kill)

    async def start(self) -> None:
        """Start the process."""
        await self._call("start", self.inside.start)

    async def prepare(self, batch: BatchRecord) -> None:
        """Keep the batch."""
        await self._call("prepare", lambda: self.inside.prepare(batch))

    async def forward_backward(self, update: int, microbatch: Microbatch) -> StepStats:
        """Add a gradient."""
        return await self._call("forward_backward", lambda: self.inside.forward_backward(update, microbatch))

    async def optim_step(self) -> StepStats:
        """Apply it."""
        return await self._call("optim_step", self.inside.optim_step)

    async def publish(self, number: int, *, incarnation: int) -> Publication:
        """Write the weights into the shared memory."""
        return await self._call("publish", lambda: self.inside.publish(number, incarnation=incarnation))

    async def canary(self) -> Canary:
        """Score fixed tokens."""
        return await self._call("canary", self.inside.canary)

    async def save(self, folder: str, *, step: int) -> None:
        """Begin a checkpoint."""
        await self._call("save", lambda: self.inside.save(folder, step=step))

    async def flush(self) -> None:
        """Write it."""
        await self._around.network.call(self.process, "flush", self.inside.flush)

    async def load(self, folder: str) -> int:
        """Restore a checkpoint."""
        return await self._call("load", lambda: self.inside.load(folder))

    async def export(self, folder: str) -> None:
        """Write the model."""
        await self._call("export", lambda: self.inside.export(folder))

    async def check_health(self) -> tuple[Wait, ...]:
        """Nothing, while it lives."""
        return await self._around.network.call(self.process, "check_health", self.inside.check_health)

    async def close(self) -> None:
        """End the process, and unlink its shared memory."""
        self._around.network.check()
        self.process.kill("closed")
        self._around.shared_memory.pop(self._path, None)

    async def _call(self, verb: str, work: Callable[[], Awaitable[T]]) -> T:
        return await self._around.network.call(self.process, verb, work, is_ordered=True)
