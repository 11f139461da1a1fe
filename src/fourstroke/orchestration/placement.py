"""Where parts run. Classes are plain Python (``actors``); this file alone makes Ray actors of them and awaits Ray.

    driver: RayEngine   RayTrainer   RayWorker        behind the protocols of ``types``
               |            |            |            bytes of nouns, one call a verb
    actors: EngineActor TrainerActor WorkerActor --generate--> EngineActor
               '-- vLLM's core process   '-- grader processes

On one machine Ray is embedded: started with the run and ended with it, on loopback, with token authentication. Nothing
large goes through its object store: weights travel in shared memory, tokens through the payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import ray
from ray.exceptions import RayError, TaskCancelledError

from fourstroke.config import RunConfig
from fourstroke.errors import ActorDiedError, ClusterDiedError, EngineDiedError, FourstrokeError, boundary
from fourstroke.orchestration.actors import (
    EngineActor,
    TrainerActor,
    WorkerActor,
    split_answers,
    unpack,
)
from fourstroke.types import (
    Assignment,
    BatchRecord,
    Canary,
    Completion,
    Engine,
    GroupRecord,
    Microbatch,
    Publication,
    RefusedGroup,
    SampleRequest,
    StepStats,
    Wait,
    WeightVersion,
    decode,
    decode_either,
    encode,
)
from fourstroke.types.nouns import Noun

_GRACE_S = 5.0
# The least that Ray takes; everything of size travels by other ways.
_OBJECT_STORE_BYTES = 80 * 2**20
_MANY_CALLS = 100_000
# Of Ray's processes, those that it does not survive.
_DAEMONS = ("gcs_server", "raylet")

# They pin the kernels that deterministic runs rest on, and must stand before the libraries are loaded.
_TRAINER_VARIABLES = {"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# By OpenMP's own way of waiting, threads spin on cores that another process needs: beside a busy one training takes
# five times as long. With the engine at work beside it, a thread that waits sleeps at once. Where the two take turns it
# looks a few times first, which saves a tenth of a pass: that is some thousand short regions.
_WAITING_BESIDE = {"OMP_WAIT_POLICY": "PASSIVE"}
_WAITING_ALONE = {"GOMP_SPINCOUNT": "1000"}

NounT = TypeVar("NounT", bound=Noun)


class Cluster:
    """Ray, embedded: its processes belong to this run.

    Args:
        folder: Where Ray keeps its sockets and logs; made by ``start`` and gone after ``stop``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: dict[str, psutil.Process] = {}
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether one of Ray's own processes was found dead: nothing may be asked of it any more."""
        return self._is_lost

    @property
    def folder(self) -> Path:
        """Where Ray keeps its sockets and logs."""
        return self._folder

    def start(self) -> None:
        """Start Ray's processes.

        Raises:
            ActorDiedError: They do not start; the text says why.
        """
        on_terminate = signal.getsignal(signal.SIGTERM)
        with boundary("Ray cannot start", ActorDiedError):
            ray.init(
                address="local",
                num_cpus=0,  # actors ask for none: threads are set in one place, the configuration
                include_dashboard=False,
                _node_ip_address="127.0.0.1",  # else it would listen on the machine's own address
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(self._folder),
                # Nobody reads Ray's own record of calls, which would cost the driver a thread's work each second.
                _system_config={"prestart_worker_first_driver": False, "task_events_report_interval_ms": 0},
            )
        # Ray puts a handler of its own in its place, which would end the process in the middle of the event loop.
        signal.signal(signal.SIGTERM, on_terminate)
        children = {child.name(): child for child in psutil.Process().children()}
        self._daemons = {name: children[name] for name in _DAEMONS if name in children}

    def check_health(self) -> None:
        """Return if Ray's own processes live.

        Raises:
            ClusterDiedError: One of them is gone; the text names it.
        """
        for name, daemon in self._daemons.items():
            if not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE:
                self._is_lost = True
                raise ClusterDiedError(
                    f"Ray's {name} (process {daemon.pid}) is gone, and every part of the run with it; resume the run"
                )

    def stop(self) -> None:
        """End every process of Ray and remove its folder. May be called twice. Of a lost one the guardian ends them."""
        if not self._is_lost:
            ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Handle:
    """An actor, by name: calls it, and turns its death into an error of our tree.

    An actor that is ``ordered`` takes its calls one after the other. One of them that is taken back before it was sent
    leaves a hole in the order, for which Ray waits 30 s and then gives the actor up: such a call runs to its end, which
    nobody hears of.
    """

    def __init__(
        self,
        name: str,
        actor: Any,
        *,
        log_path: Path,
        died: type[FourstrokeError],
        cluster: Cluster | None,
        is_ordered: bool = False,
    ) -> None:
        self._is_ordered = is_ordered
        self.name = name
        self.actor = actor
        self._cluster = cluster
        self._log_path = log_path
        self._died = died
        self._process = ""
        self._is_closed = False

    def started(self, process_id: bytes) -> None:
        """Note the process that the actor lives in."""
        self._process = f" (process {process_id.decode()})"

    async def call(self, verb: str, *arguments: Any) -> list[bytes]:
        """Call a verb and wait for its answer; cancelling the caller cancels it there too, unless calls are ordered."""
        if self._is_closed:
            raise self._died(f"{self.name} was closed")
        reference = getattr(self.actor, verb).remote(*arguments)
        try:
            return unpack(await _answer(reference))
        except (RayError, TaskCancelledError) as error:
            # Ray's own text is a page; the first line says what happened.
            reason = str(error).strip().splitlines()[0]
            raise self._died(f"{self.name}{self._process} is gone: {reason} Its log is {self._log_path}") from error
        except asyncio.CancelledError:
            # Not in a loop that ends after Ray.
            if not self._is_ordered and ray.is_initialized() and not self._is_lost():
                ray.cancel(reference, force=False)
            raise

    async def close(self) -> None:
        """Let the actor clean up, then end its process. May be called twice."""
        if self._is_closed or self._is_lost():
            return
        with contextlib.suppress(FourstrokeError, TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self.call("close")
        self._is_closed = True
        ray.kill(self.actor)

    def _is_lost(self) -> bool:
        return self._cluster is not None and self._cluster.is_lost


async def _answer(reference: Awaitable[Any]) -> Any:
    return await reference


class RemoteSampler:
    """An engine actor as a worker sees it; satisfies ``types.Sampler``."""

    def __init__(self, name: str, actor: Any, *, log_path: Path = Path("logs"), cluster: Cluster | None = None) -> None:
        self._handle = _Handle(name, actor, log_path=log_path, died=EngineDiedError, cluster=cluster)

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self._handle.name

    @property
    def actor(self) -> Any:
        """Ray's handle."""
        return self._handle.actor

    async def generate(self, request: SampleRequest) -> tuple[Completion, ...]:
        """Sample ``request.num_samples`` completions."""
        return tuple(decode(part, Completion) for part in await self._handle.call("generate", encode(request)))

    async def generate_together(self, requests: Sequence[SampleRequest]) -> tuple[tuple[Completion, ...], ...]:
        """Sample all requests as one batch that repeats bit for bit."""
        parts = await self._handle.call("generate_together", [encode(request) for request in requests])
        return tuple(tuple(decode(part, Completion) for part in answer) for answer in split_answers(parts, requests))


class RayEngine(RemoteSampler):
    """A vLLM engine in an actor of its own; satisfies ``types.Engine``.

    Args:
        config: The run's.
        cluster: Where it is placed.
        model_path: Folder in Hugging Face format.
        name: Name in spans and logs.
        is_replacement: Whether it must be brought to the present weights before it serves.
        log_path: Its log.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        cluster: Cluster,
        model_path: Path,
        name: str,
        is_replacement: bool,
        log_path: Path,
    ) -> None:
        actor = (
            ray.remote(EngineActor)
            .options(num_cpus=0, max_concurrency=_MANY_CALLS, runtime_env=_threads(config.engine.num_threads))
            .remote(config.model_dump_json(), str(model_path), name, is_replacement, str(log_path))
        )
        super().__init__(name, actor, log_path=log_path, cluster=cluster)
        self._version: WeightVersion | None = None

    @property
    def version(self) -> WeightVersion:
        """The weights that a request admitted now is sampled under; known once it has started."""
        assert self._version is not None, f"{self.name} has not started"
        return self._version

    async def start(self) -> None:
        """Load the model and be ready to generate."""
        process_id, version = await self._handle.call("start")
        self._handle.started(process_id)
        self._version = decode(version, WeightVersion)

    async def pause(self) -> None:
        """Hold all requests."""
        await self._handle.call("pause")

    async def update_weights(self, publication: Publication) -> WeightVersion:
        """Load a publication and return the version that the engine now proves to hold."""
        self._version = _only(await self._handle.call("update_weights", encode(publication)), WeightVersion)
        return self._version

    async def resume(self) -> None:
        """Let requests run again."""
        await self._handle.call("resume")

    async def score(self, ids_BT: np.ndarray) -> Canary:
        """What the weights that are held now say of fixed tokens."""
        unscored = Canary(ids_BT=ids_BT, logprobs_BT=np.zeros((0, 0), dtype=np.float32))
        return _only(await self._handle.call("score", encode(unscored)), Canary)

    async def check_health(self) -> None:
        """Return if the engine is alive."""
        await self._handle.call("check_health")

    async def close(self) -> None:
        """End every process of the engine."""
        await self._handle.close()


class RayWorker:
    """A rollout worker in an actor of its own; satisfies ``types.Worker``.

    Args:
        config: The run's.
        cluster: Where it is placed.
        model_path: Folder with the tokenizer.
        name: Name in logs.
        payload_dir: Where groups are stored.
        log_path: Its log.
        environment: Variables for the processes of graders.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        cluster: Cluster,
        model_path: Path,
        name: str,
        payload_dir: Path,
        log_path: Path,
        environment: Mapping[str, str],
    ) -> None:
        actor = (
            ray.remote(WorkerActor)
            .options(num_cpus=0, max_concurrency=_MANY_CALLS)
            .remote(
                config.model_dump_json(),
                str(model_path),
                name,
                str(payload_dir),
                str(log_path),
                dict(environment),
                RemoteSampler,
            )
        )
        self._handle = _Handle(name, actor, log_path=log_path, died=ActorDiedError, cluster=cluster)

    @property
    def name(self) -> str:
        """Name in logs."""
        return self._handle.name

    async def start(self) -> None:
        """Import the user's code and be ready."""
        (process_id,) = await self._handle.call("start")
        self._handle.started(process_id)

    async def route(self, engines: Sequence[Engine]) -> None:
        """From now on sample on these engines alone."""
        pairs = []
        for engine in engines:
            assert isinstance(engine, RayEngine), engine
            pairs.append((engine.name, engine.actor))
        await self._handle.call("route", pairs)

    async def run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        """Sample, grade and store the groups; answers in the order of the assignments."""
        parts = await self._handle.call("run", [encode(assignment) for assignment in assignments], is_together)
        return tuple(decode_either(part, GroupRecord, RefusedGroup) for part in parts)

    async def check_health(self) -> tuple[Wait, ...]:
        """What the worker waits for now."""
        return tuple(decode(part, Wait) for part in await self._handle.call("check_health"))

    async def close(self) -> None:
        """End every process of the worker."""
        await self._handle.close()


class RayTrainer:
    """The trainer in an actor of its own; satisfies ``types.Trainer``.

    Args:
        config: The run's.
        cluster: Where it is placed.
        model_path: Folder in Hugging Face format.
        payload_dir: Where groups are stored.
        publication_path: File in shared memory that weights are published through.
        log_path: Its log.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        cluster: Cluster,
        model_path: Path,
        payload_dir: Path,
        publication_path: Path,
        log_path: Path,
    ) -> None:
        waiting = _WAITING_BESIDE if config.rollout.staleness else _WAITING_ALONE
        variables = _threads(config.trainer.num_threads, **_TRAINER_VARIABLES, **waiting)
        actor = (
            ray.remote(concurrency_groups={"beside": 2})(_trainer_class())  # type: ignore[call-overload]
            .options(num_cpus=0, runtime_env=variables)
            .remote(config.model_dump_json(), str(model_path), str(payload_dir), str(publication_path), str(log_path))
        )
        self._publication_path = publication_path
        self._handle = _Handle(
            "trainer", actor, log_path=log_path, died=ActorDiedError, cluster=cluster, is_ordered=True
        )

    async def start(self) -> None:
        """Start the process and load the model."""
        (process_id,) = await self._handle.call("start")
        self._handle.started(process_id)

    async def prepare(self, batch: BatchRecord) -> None:
        """Read the batch's rows into the rank and, where it says so, compute proximal log-probabilities."""
        await self._handle.call("prepare", encode(batch))

    async def forward_backward(self, update: int, microbatch: Microbatch) -> StepStats:
        """Add the gradient of some rows of a prepared batch."""
        return _only(await self._handle.call("forward_backward", update, encode(microbatch)), StepStats)

    async def optim_step(self) -> StepStats:
        """Clip, apply and clear the gradient."""
        return _only(await self._handle.call("optim_step"), StepStats)

    async def publish(self, number: int, *, incarnation: int) -> Publication:
        """Write the weights where engines read them."""
        return _only(await self._handle.call("publish", number, incarnation), Publication)

    async def canary(self) -> Canary:
        """What the weights say now of fixed tokens."""
        return _only(await self._handle.call("canary"), Canary)

    async def save(self, folder: str, *, step: int) -> None:
        """Begin to write a checkpoint."""
        await self._handle.call("save", folder, step)

    async def flush(self) -> None:
        """Return once the checkpoint is whole on disk."""
        await self._handle.call("flush")

    async def load(self, folder: str) -> int:
        """Restore a checkpoint exactly; returns its step."""
        (step,) = await self._handle.call("load", folder)
        return int(step)

    async def export(self, folder: str) -> None:
        """Write the model in Hugging Face format."""
        await self._handle.call("export", folder)

    async def check_health(self) -> tuple[Wait, ...]:
        """What the trainer is at now."""
        return tuple(decode(part, Wait) for part in await self._handle.call("check_health"))

    async def close(self) -> None:
        """End the process and remove the shared file that it may have left."""
        await self._handle.close()
        self._publication_path.unlink(missing_ok=True)


def _threads(num_threads: int | None, **variables: str) -> dict[str, dict[str, str]]:
    """Ray's description of an actor's environment; without the number of threads Ray would have it be 1."""
    return {"env_vars": {"OMP_NUM_THREADS": str(num_threads or len(os.sched_getaffinity(0))), **variables}}


def _trainer_class() -> type[TrainerActor]:
    """The trainer's class with the verbs that answer beside the others."""

    class Placed(TrainerActor):
        flush = ray.method(concurrency_group="beside")(TrainerActor.flush)
        check_health = ray.method(concurrency_group="beside")(TrainerActor.check_health)

    return Placed


def _only(parts: Sequence[bytes], noun: type[NounT]) -> NounT:
    (part,) = parts
    return decode(part, noun)
