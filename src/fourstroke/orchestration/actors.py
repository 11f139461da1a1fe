"""What runs inside the actors: the real engine, trainer and worker behind methods that take and return bytes.

    placement (driver) --bytes of nouns--> EngineActor  --> VllmEngine
                                           WorkerActor  --> RolloutWorker
                                           TrainerActor --> TorchTrainer

Plain Python: this file does not know of Ray, so tests may call these classes directly. An error of our tree goes back
as a name and a sentence, never as a pickle. Heavy libraries are imported when a part is made, not when this is.
"""

from __future__ import annotations

import asyncio
import functools
import os
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fourstroke import errors
from fourstroke.config import RunConfig, resolve_reference
from fourstroke.errors import ActorFailedError, DataError, FourstrokeError, boundary
from fourstroke.observability import Waits, monotonic_s
from fourstroke.store import PayloadWriter, read_payload
from fourstroke.tokens import episode_rows
from fourstroke.types import (
    Assignment,
    Batch,
    BatchRecord,
    Canary,
    Column,
    Group,
    Microbatch,
    Publication,
    Sampler,
    SampleRequest,
    Taskset,
    Trajectory,
    Wait,
    decode,
    encode,
)

# What a method answers with: "ok" and the bytes of nouns, or "error" and a class of our tree with its sentence.
Answer = tuple[str, list[bytes]]


def unpack(answer: Answer) -> list[bytes]:
    """The bytes of an answer.

    Raises:
        FourstrokeError: The other side raised one; of the same class, with the same sentence.

    Example:
        >>> unpack(("error", [b"DataError", b"row 3 is empty"]))
        Traceback (most recent call last):
        fourstroke.errors.DataError: row 3 is empty
    """
    outcome, parts = answer
    if outcome == "ok":
        return parts
    name, text = (part.decode() for part in parts)
    kind = getattr(errors, name, ActorFailedError)
    raise (kind if isinstance(kind, type) and issubclass(kind, FourstrokeError) else ActorFailedError)(text)


def _refused(error: FourstrokeError) -> Answer:
    traceback.print_exc()  # into the log file of this process
    return "error", [type(error).__name__.encode(), str(error).encode()]


def _answered(method: Callable[..., list[bytes]]) -> Callable[..., Answer]:
    """A method whose errors are answers."""

    @functools.wraps(method)
    def answer(self: Any, *arguments: Any) -> Answer:
        try:
            with boundary(method.__name__, ActorFailedError):
                return "ok", method(self, *arguments)
        except FourstrokeError as error:
            return _refused(error)

    return answer


def _answered_async(method: Callable[..., Awaitable[list[bytes]]]) -> Callable[..., Awaitable[Answer]]:
    """The same for a coroutine function."""

    @functools.wraps(method)
    async def answer(self: Any, *arguments: Any) -> Answer:
        try:
            with boundary(method.__name__, ActorFailedError):
                return "ok", await method(self, *arguments)
        except FourstrokeError as error:
            return _refused(error)

    return answer


def _settle(log_path: Path) -> None:
    """Send what any library prints in this process into the log. (Ctrl-C does not reach it: Ray gives it a group.)"""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class EngineActor:
    """One vLLM engine."""

    def __init__(self, config_json: str, model_path: str, name: str, is_replacement: bool, log_path: str) -> None:
        _settle(Path(log_path))
        from fourstroke.engines.vllm import CHECKPOINT, REPLACEMENT, VllmEngine

        config = RunConfig.model_validate_json(config_json)
        held = REPLACEMENT if is_replacement else CHECKPOINT
        self._one_batch = asyncio.Lock()
        self._engine = VllmEngine(
            config.engine, Path(model_path), seed=config.seed, name=name, held=held, log_path=Path(log_path)
        )

    @_answered_async
    async def start(self) -> list[bytes]:
        """Load the model; answers with the process id and the version held."""
        await self._engine.start()
        return [str(os.getpid()).encode(), encode(self._engine.version)]

    @_answered_async
    async def generate(self, request: bytes) -> list[bytes]:
        """One request; a completion each part."""
        return [encode(completion) for completion in await self._engine.generate(decode(request, SampleRequest))]

    @_answered_async
    async def generate_together(self, requests: list[bytes]) -> list[bytes]:
        """Many requests; the completions of all of them, in order."""
        # A batch whose worker died runs on; its successor waits for it.
        async with self._one_batch:
            answers = await self._engine.generate_together([decode(request, SampleRequest) for request in requests])
        return [encode(completion) for answer in answers for completion in answer]

    @_answered_async
    async def pause(self) -> list[bytes]:
        """Hold all requests."""
        await self._engine.pause()
        return []

    @_answered_async
    async def update_weights(self, publication: bytes) -> list[bytes]:
        """Load a publication; answers with the version then held."""
        return [encode(await self._engine.update_weights(decode(publication, Publication)))]

    @_answered_async
    async def resume(self) -> list[bytes]:
        """Let requests run again."""
        await self._engine.resume()
        return []

    @_answered_async
    async def score(self, canary: bytes) -> list[bytes]:
        """What the weights say of the tokens of a ``Canary``; a ``Canary`` again."""
        return [encode(await self._engine.score(decode(canary, Canary).ids_BT))]

    @_answered_async
    async def check_health(self) -> list[bytes]:
        """Nothing, if the engine lives."""
        await self._engine.check_health()
        return []

    @_answered_async
    async def close(self) -> list[bytes]:
        """End the engine's processes."""
        await self._engine.close()
        return []


class WorkerActor:
    """One rollout worker: imports the user's environments and graders here alone."""

    def __init__(
        self,
        config_json: str,
        model_path: str,
        name: str,
        payload_dir: str,
        log_path: str,
        environment: Mapping[str, str],
        connect: Callable[[str, Any], Sampler],
    ) -> None:
        _settle(Path(log_path))
        from fourstroke.engines.router import Router
        from fourstroke.rewards import GraderPool
        from fourstroke.rollout import GroupRunner, RolloutWorker
        from fourstroke.tokens import Renderer

        config = RunConfig.model_validate_json(config_json)
        make_taskset = resolve_reference("tasks.use", config.tasks.use, arguments=config.tasks.arguments)
        taskset: Taskset = make_taskset()
        waits, router = Waits(name), Router()
        graders = GraderPool(
            config.grader,
            timeout_s=config.deadlines.grade_s,
            start_timeout_s=config.deadlines.start_s,
            environment=environment,
            log_path=Path(log_path),
        )
        runner = GroupRunner(
            config,
            taskset=taskset,
            graders=graders,
            sampler=router,
            renderer=Renderer(Path(model_path)),
            waits=waits,
        )
        self._router, self._connect = router, connect
        payload = PayloadWriter(Path(payload_dir))
        self._worker = RolloutWorker(name, runner=runner, router=router, payload=payload, waits=waits)

    @_answered_async
    async def start(self) -> list[bytes]:
        """Start the graders; answers with the process id."""
        await self._worker.start()
        return [str(os.getpid()).encode()]

    @_answered_async
    async def route(self, engines: list[tuple[str, Any]]) -> list[bytes]:
        """Sample on these engines, given by name and handle."""
        self._router.route([self._connect(name, handle) for name, handle in engines])
        return []

    @_answered_async
    async def run(self, assignments: list[bytes], is_together: bool) -> list[bytes]:
        """Roll groups; a ``GroupRecord`` or a ``RefusedGroup`` each part."""
        decoded = [decode(assignment, Assignment) for assignment in assignments]
        return [encode(record) for record in await self._worker.run(decoded, is_together=is_together)]

    @_answered_async
    async def check_health(self) -> list[bytes]:
        """A ``Wait`` each part."""
        return [encode(wait) for wait in await self._worker.check_health()]

    @_answered_async
    async def close(self) -> list[bytes]:
        """End the graders."""
        await self._worker.close()
        return []


class TrainerActor:
    """The trainer of one process. Verbs run in one thread; ``flush`` and ``check_health`` answer beside them."""

    def __init__(
        self, config_json: str, model_path: str, payload_dir: str, publication_path: str, log_path: str
    ) -> None:
        _settle(Path(log_path))
        from fourstroke.algorithms.losses import bind_loss
        from fourstroke.trainer.engine import TorchTrainer

        config = RunConfig.model_validate_json(config_json)
        self._payload_dir = Path(payload_dir)
        self._batches: dict[int, Batch] = {}
        self._doing: tuple[str, float] | None = None
        self._trainer = TorchTrainer(
            config,
            model_path=Path(model_path),
            publication_path=Path(publication_path),
            loss=bind_loss(config.algorithm),
        )

    @_answered
    def start(self) -> list[bytes]:
        """Load the model; answers with the process id."""
        with self._at("load the model"):
            self._trainer.start()
        return [str(os.getpid()).encode()]

    @_answered
    def prepare(self, batch: bytes) -> list[bytes]:
        """Read a batch's rows out of the store."""
        record = decode(batch, BatchRecord)
        with self._at(f"prepare update {record.update} of step {record.step}"):
            if record.update == 0:
                self._batches.clear()
            rows = Batch(
                step=record.step,
                rows=read_rows(record, self._payload_dir),
                num_sequences=record.num_sequences,
                num_loss_tokens=record.num_loss_tokens,
            )
            self._batches[record.update] = self._trainer.prepare(rows) if record.needs_proximal else rows
        return []

    @_answered
    def forward_backward(self, update: int, microbatch: bytes) -> list[bytes]:
        """Sums over a micro-batch."""
        batch = self._batches[update]
        with self._at(f"forward and backward of step {batch.step}"):
            return [encode(self._trainer.forward_backward(batch, decode(microbatch, Microbatch)))]

    @_answered
    def optim_step(self) -> list[bytes]:
        """What the optimiser did."""
        with self._at("the optimiser's update"):
            return [encode(self._trainer.optim_step())]

    @_answered
    def publish(self, number: int, incarnation: int) -> list[bytes]:
        """A ``Publication``."""
        with self._at(f"write publication {number}"):
            return [encode(self._trainer.publish(number, incarnation=incarnation))]

    @_answered
    def canary(self) -> list[bytes]:
        """A ``Canary``."""
        with self._at("score the canary"):
            return [encode(self._trainer.canary())]

    @_answered
    def save(self, folder: str, step: int) -> list[bytes]:
        """Begin a checkpoint."""
        self._trainer.save(folder, step=step)
        return []

    @_answered
    def flush(self) -> list[bytes]:
        """Return when the checkpoint is whole."""
        self._trainer.flush()
        return []

    @_answered
    def load(self, folder: str) -> list[bytes]:
        """The step of a checkpoint that was restored."""
        with self._at(f"load {folder}"):
            return [str(self._trainer.load(folder)).encode()]

    @_answered
    def export(self, folder: str) -> list[bytes]:
        """Write the model."""
        with self._at(f"export to {folder}"):
            self._trainer.export(folder)
        return []

    @_answered
    def check_health(self) -> list[bytes]:
        """What the verbs' thread is at, as a ``Wait``."""
        if self._doing is None:
            return []
        what, since_s = self._doing
        waited_s = monotonic_s() - since_s
        return [encode(Wait(part="trainer", what=what, waited_s=waited_s, deadline_s=0.0))]

    @_answered
    def close(self) -> list[bytes]:
        """Give back the shared buffer."""
        self._trainer.close()
        return []

    @contextmanager
    def _at(self, what: str) -> Iterator[None]:
        self._doing = what, monotonic_s()
        try:
            yield
        finally:
            self._doing = None


def read_rows(batch: BatchRecord, payload_dir: Path) -> tuple[Trajectory, ...]:
    """The rows of a batch, out of the store, with the two numbers that make each train.

    Args:
        batch: Which rows, and their advantages and weights.
        payload_dir: The run's payload.

    Raises:
        RunFolderError: A segment is missing or damaged.
        DataError: The store holds another row than the record says.
    """
    groups = {key: read_payload(payload_dir, reference, Group) for key, reference in batch.references.items()}
    episodes = {
        (key, member.episode.member): member.episode for key, group in groups.items() for member in group.members
    }
    rows_of = functools.cache(lambda key, member: episode_rows(episodes[key, member]))
    rows = []
    for record in batch.rows:
        row = rows_of(record.group, record.member)[record.row]
        if (row.num_tokens, row.num_loss_tokens) != (record.num_tokens, record.num_loss_tokens):
            raise DataError(
                f"row {record.id} has {row.num_tokens} tokens, {row.num_loss_tokens} of them in the loss; its record "
                f"says {record.num_tokens} and {record.num_loss_tokens}"
            )
        mask_T = row[Column.LOSS_MASK]
        rows.append(
            row.with_columns(
                advantages=np.where(mask_T, record.advantage, 0.0).astype(np.float32),
                weight=np.where(mask_T, record.weight, 0.0).astype(np.float32),
            )
        )
    return tuple(rows)


def split_answers(parts: Sequence[bytes], requests: Sequence[SampleRequest]) -> Iterator[list[bytes]]:
    """The parts of ``generate_together``, request by request.

    Example:
        >>> request = SampleRequest(id="g1", prompt_ids=np.array([1], np.int32), num_samples=2, max_tokens=3,
        ...                         temperature=1.0, stop_ids=(), seed=7)
        >>> [len(answer) for answer in split_answers([b"a", b"b", b"c", b"d"], [request, request])]
        [2, 2]
    """
    remaining = iter(parts)
    for request in requests:
        yield [next(remaining) for _ in range(request.num_samples)]
