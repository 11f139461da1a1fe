"""vLLM behind the ``Engine`` protocol, through its own asynchronous engine and its own pause and weight interfaces.

    start    import, launch the core process (its thread is ours: see ``_launch``), watch that process
    generate request -> its members -> gate (shut while paused) -> vLLM -> completions with versions
    update   shut the gate, pause -> start, update, finish -> the worker's own word on what it holds -> resume, open

What a pause does to the requests that run is ``engine.landing``:

    landing   running requests                          caches    then
    keep      stop where they are                       cleared   computed again under the new weights
    keep_kv   stop where they are, values kept          kept      go on; newer requests share none of what is cached
    drain     run to their end, which the pause awaits  cleared
    abort     are cut                                   cleared   prompt and tokens so far are a new request

Invariants: a request is checked here before vLLM sees it; nothing passes a shut gate; every call to vLLM ends when the
core process does; a caller that is cancelled leaves nothing running; versions come from vLLM's spans and never from
when an answer arrives. The same code runs on CPU and on GPU, on any event loop and in any thread. May not judge
publications (``weights.receive`` does, in the core process) nor decide when to pause.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from fourstroke.config import EngineConfig
from fourstroke.engines.vllm_member import Member
from fourstroke.errors import DataError, EngineDiedError, FourstrokeError, PublicationError, boundary
from fourstroke.observability.processes import forget_openmp
from fourstroke.types import Canary, Completion, Publication, SampleRequest, WeightVersion, decode, encode

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# vLLM silently raises a lower temperature to its minimum and refuses a higher one than its maximum.
TEMPERATURE_RANGE = (0.01, 2.0)
# The weights that vLLM loads from the checkpoint at start; no publication has this digest.
CHECKPOINT = WeightVersion(incarnation=0, number=0, digest="checkpoint")
# The same in an engine that joins a run under way: older than any publication, so that it can catch up with any.
REPLACEMENT = WeightVersion(incarnation=-1, number=0, digest="checkpoint")

_BACKEND = "shared_memory"
_MIN_BATCHED_TOKENS = 8192
_GRACE_S = 2
_RAISED_IN_CORE = " method failed: "
# Says in each process that Triton is missing, as it is wherever the processor does the work: errors alone.
_TRITON_LOGGER = "torch._library.triton"
_NOT_SET = "not set before fourstroke"
_LOGGING_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
_LOGGING_CONFIG = "logging.json"
_POLL_S = 0.05
_NUM_LOOKS = 10
_PAUSES: dict[str, Literal["keep", "wait", "abort"]] = {
    "keep": "keep",
    "keep_kv": "keep",
    "drain": "wait",
    "abort": "abort",
}
# Start-up sets variables of the whole process, and tells its children from others': one engine at a time.
_STARTING = threading.Lock()

T = TypeVar("T")


def engine_arguments(
    config: EngineConfig,
    model_path: Path,
    *,
    seed: int,
    scratch: Path,
    on_gpu: bool = False,
    log_path: Path | None = None,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``AsyncEngineArgs``.

    A prompt is never split over prefills (chunked prefill off, batches that hold any prompt): on CPU a split one with a
    seed of its own kills vLLM, and deterministic runs need it whole.

    Args:
        config: The engine's section.
        model_path: Folder in Hugging Face format.
        seed: Seed of the engine's own generators; requests bring theirs.
        scratch: Folder for the files of one engine's life.
        on_gpu: Whether vLLM runs on a GPU: ``gpu_memory_fraction`` then sizes the cache, else ``kv_cache_gib``.
        log_path: File for what the core process prints, or None to leave it.

    Example:
        >>> engine_arguments(EngineConfig(), Path("model"), seed=0, scratch=Path("/tmp/x"))["max_model_len"]
        1024
    """
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "load_format": "safetensors",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": config.dtype,
        "seed": seed,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_MIN_BATCHED_TOKENS, config.max_model_len, config.max_num_seqs),
        "enforce_eager": config.is_eager,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": _BACKEND},
        "worker_extension_cls": "fourstroke.engines.vllm_worker.WorkerExtension",
        "distributed_executor_backend": "fourstroke.engines.vllm_worker.CoreExecutor",
        "additional_config": {
            "num_threads": config.num_threads,
            "log_path": log_path and str(log_path),
            "scratch": str(scratch),
        },
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_gpu:
        arguments["gpu_memory_utilization"] = config.gpu_memory_fraction
    else:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
        # The smallest that the kernels take. Only whole blocks are shared among prompts that begin alike, and vLLM's
        # own choice of 128 tokens is longer than many a prompt.
        arguments["block_size"] = 32
    return arguments


def child_environment(*, scratch: Path, openmp: Path | None, log_path: Path | None) -> dict[str, str]:
    """Environment variables for vLLM and its core process, as data; :func:`_set_for_children` applies them.

    Args:
        scratch: Folder for the files of one engine's life.
        openmp: Intel's OpenMP library to preload where the processor does the work, or None. Its threads sleep soon
            after a parallel region, where GNU's would spin on cores that the trainer needs.
        log_path: File for logs; with None nothing but errors is to be seen.

    Example:
        >>> child_environment(scratch=Path("/tmp/x"), openmp=None, log_path=None)["OMP_WAIT_POLICY"]
        'PASSIVE'
    """
    variables = {
        _LOGGING_VARIABLE: str(scratch / _LOGGING_CONFIG),
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_LOGS": f"-{_TRITON_LOGGER}",
    }
    if openmp is None:
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        variables |= {"LD_PRELOAD": str(openmp), "KMP_BLOCKTIME": "1", "KMP_TPAUSE": "0"}
    if log_path is None:
        variables |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    return variables


class VllmEngine:
    """One vLLM engine, embedded; satisfies ``types.Engine``. Belongs to the event loop that started it.

    Args:
        config: The engine's section.
        model_path: Folder in Hugging Face format.
        seed: Seed of the engine's own generators.
        name: Name in spans and logs.
        log_path: File for vLLM's logs; with None its errors alone go to the terminal.
        held: What the weights in ``model_path`` count as: ``CHECKPOINT`` at the start of a run, else ``REPLACEMENT``.

    Example:
        >>> engine = VllmEngine(EngineConfig(), Path("smollm2"), seed=0)  # doctest: +SKIP
        >>> await engine.start()  # doctest: +SKIP
        >>> (completion,) = await engine.generate(request)  # doctest: +SKIP
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        seed: int,
        name: str = "vllm-0",
        log_path: Path | None = None,
        held: WeightVersion = CHECKPOINT,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._seed = seed
        self._name = name
        self._log_path = log_path
        self._version = held
        self._vocab_size = 0
        self._landing = config.landing
        # Open unless a pause has begun; members wait there to be added.
        self._gate = asyncio.Event()
        self._gate.set()
        self._is_paused = False
        self._is_together = False
        # Of every request that was not answered yet, in the order of the requests.
        self._members: dict[Member, None] = {}
        self._serial = count()
        self._llm: AsyncLLM | None = None
        # One thread launches vLLM and then lives as long as it: the kernel takes the end of the thread that started a
        # process for the end of its parent, and the core process dies with its parent.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-launch")
        self._launching: Future[None] | None = None
        self._processes: set[BaseProcess] = set()
        self._others: set[BaseProcess] = set()
        self._is_adopting = False
        self._watched: dict[int, BaseProcess] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._buried = asyncio.Event()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._obituary = f"{name} was not started"

    @property
    def name(self) -> str:
        """Name of this engine in spans and logs."""
        return self._name

    @property
    def version(self) -> WeightVersion:
        """The weights that a request admitted now is sampled under."""
        return self._version

    async def start(self) -> None:
        """Load the model and be ready to generate, under the version that it was made with.

        Raises:
            EngineDiedError: vLLM cannot start; the text says why.
        """
        with boundary(f"{self._name} cannot start{self._see_log()}", EngineDiedError):
            self._vocab_size = _vocab_size(self._model_path)
            self._launching = self._thread.submit(self._launch)
            await asyncio.wrap_future(self._launching)
            for process in self._processes:
                self._watch(process)
        self._obituary = ""
        await self._call("start", self._introduce(self._living()))

    async def generate(self, request: SampleRequest) -> tuple[Completion, ...]:
        """Sample ``request.num_samples`` completions. While paused, the request waits for ``resume``.

        A caller that is cancelled takes its request along: vLLM stops working on it.

        Raises:
            DataError: A token id lies outside the vocabulary, prompt and reply do not fit the context, or vLLM cannot
                sample at the temperature.
            EngineDiedError: The engine died before it answered.
        """
        llm = self._living()
        assert not self._is_together, f"{self._name}: request {request.id} beside requests that run together"
        self._check_request(request)
        members = self._members_of(llm, request)
        with self._answering(members):
            return tuple(await self._call(f"request {request.id}", self._finish_all(members)))

    async def generate_together(self, requests: Sequence[SampleRequest]) -> tuple[tuple[Completion, ...], ...]:
        """Sample all requests as one batch that repeats bit for bit: answers in the order of the requests.

        All are added in order while vLLM is paused with empty caches, then released, so that vLLM composes the same
        steps each time. Legal only while nothing else runs and not paused.

        Raises:
            DataError, EngineDiedError: As ``generate``; with a ``DataError`` none was sampled.
        """
        llm = self._living()
        assert not self._members, f"{self._name}: {len(self._members)} completions run beside requests together"
        assert self._gate.is_set(), f"{self._name}: requests together while paused"
        for request in requests:
            self._check_request(request)
        groups = [self._members_of(llm, request) for request in requests]
        members = [member for group in groups for member in group]
        self._is_together = True
        try:
            with self._answering(members):
                await self._call(f"{len(requests)} requests together", self._run_together(llm, members))
        finally:
            self._is_together = False
        return tuple(tuple(member.completion for member in group) for group in groups)

    async def pause(self) -> None:
        """Hold new requests, and do with those that run as ``engine.landing`` says; see the module.

        One that was given up before it was done is ended by ``resume``.
        """
        llm = self._living()
        assert not self._is_together, f"{self._name}: pause while requests run together"
        self._gate.clear()
        await self._call("pause", self._land(llm))
        self._is_paused = True

    async def update_weights(self, publication: Publication) -> WeightVersion:
        """Load a publication and return the version that the worker now proves to hold. Legal only while paused.

        One of the very version that is held already (a fleet publishes again to all after a replacement) changes
        nothing.

        Raises:
            PublicationError: The worker refused it, or holds another version afterwards.
            EngineDiedError: The engine died on the way.
        """
        llm = self._living()
        assert self._is_paused, f"{self._name}: update_weights while requests run"
        what = f"publication {publication.version.number}"
        held = await self._call(what, self._update(llm, publication), into=PublicationError)
        if held != publication.version:
            raise PublicationError(f"{self._name} was sent version {publication.version} and holds {held}")
        self._version = held
        return held

    async def resume(self) -> None:
        """Let requests run again."""
        llm = self._living()
        self._is_paused = False
        await self._call("resume", llm.resume_generation())
        self._gate.set()

    async def score(self, ids_BT: np.ndarray) -> Canary:
        """What the weights that are held now say of fixed tokens. Legal at any time, while paused too.

        Without rows where vLLM computes the model's attention in a way that needs its cache.
        """
        return await self._call("score", self._score(self._living(), ids_BT))

    async def check_health(self) -> None:
        """Return if the engine is alive.

        Raises:
            EngineDiedError: It is not; the text names the process and how it ended.
        """
        await self._call("health", self._living().check_health())

    async def close(self) -> None:
        """End the core process, by force if need be, and wait until it is gone. Legal at any time, and twice."""
        self._obituary = self._obituary or f"{self._name} was closed"
        self._buried.set()
        loop = asyncio.get_running_loop()
        for descriptor in list(self._watched):
            self._unwatch(descriptor)
        for task in tuple(self._tasks):
            task.cancel()
        while self._launching is not None and not self._launching.done():
            # A launch that nobody waits for any more: it fails once its process is gone, which may not be there yet.
            self._kill()
            await asyncio.sleep(_POLL_S)
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                # Otherwise vLLM takes its own shutdown for a death of the core, and logs it as an error.
                llm.output_handler.cancel()
            await loop.run_in_executor(self._thread, llm.shutdown, _GRACE_S)
            # vLLM has closed its sockets and leaves their context to the garbage collector.
            llm.engine_core.resources.ctx.destroy(linger=0)
        self._kill()
        self._thread.shutdown()
        if self._scratch is not None:
            self._scratch.cleanup()

    # --- start ------------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Import vLLM and start its core process; runs in the thread of this engine."""
        self._scratch = tempfile.TemporaryDirectory(prefix="fourstroke-")
        scratch = Path(self._scratch.name)
        logging_config = scratch / _LOGGING_CONFIG
        logging_config.write_text(json.dumps(_logging_config(self._log_path)))
        variables = child_environment(scratch=scratch, openmp=_openmp_library(), log_path=self._log_path)
        with _STARTING:
            # The import takes seconds; a trainer that starts meanwhile must not inherit what is meant for the core.
            with _set_for_children({_LOGGING_VARIABLE: str(logging_config)}):
                from vllm.config.logging import LoggingConfig
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.platforms import current_platform
                from vllm.v1.engine.async_llm import AsyncLLM

            arguments = engine_arguments(
                self._config,
                self._model_path,
                seed=self._seed,
                scratch=scratch,
                on_gpu=not current_platform.is_cpu(),
                log_path=self._log_path,
            )
            # Said again, since vLLM reads no variable any more after its first engine in a process.
            logging = LoggingConfig(pylogging_config_file=str(logging_config))
            with _set_for_children(variables), self._adopting():
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, logging_config=logging))

    @contextmanager
    def _adopting(self) -> Iterator[None]:
        """Take the processes that start meanwhile for this engine's."""
        self._others = set(multiprocessing.active_children())
        self._is_adopting = True
        try:
            yield
            self._adopt()
        finally:
            self._is_adopting = False

    def _adopt(self) -> None:
        if self._is_adopting:
            self._processes = set(multiprocessing.active_children()) - self._others

    async def _introduce(self, llm: AsyncLLM) -> None:
        """Tell vLLM which weights it has loaded, and have it ready for the first request."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"held": encode(self._version)}))
        await llm.update_weight_version(str(self._version.number))
        # Cached by vLLM; a request that had to ask for it first could be overtaken by one that came later.
        await llm.get_supported_tasks()

    # --- requests ---------------------------------------------------------------------------------------------------

    def _check_request(self, request: SampleRequest) -> None:
        ids, num_tokens = request.prompt_ids, len(request.prompt_ids)
        low, high = TEMPERATURE_RANGE
        if num_tokens == 0:
            raise DataError(f"request {request.id} has an empty prompt")
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            wrong = int(ids[(ids < 0) | (ids >= self._vocab_size)][0])
            raise DataError(
                f"request {request.id} holds token id {wrong}, outside the vocabulary of {self._vocab_size} tokens"
            )
        if num_tokens + request.max_tokens > self._config.max_model_len:
            raise DataError(
                f"request {request.id} has {num_tokens} prompt tokens and asks for {request.max_tokens} more, which do "
                f"not fit engine.max_model_len = {self._config.max_model_len}"
            )
        if not low <= request.temperature <= high:
            raise DataError(
                f"request {request.id} has temperature {request.temperature}; vLLM samples at {low} to {high}"
            )

    def _members_of(self, llm: AsyncLLM, request: SampleRequest) -> list[Member]:
        return [
            Member(llm, request, index=index, name=f"{request.id}/{next(self._serial)}", engine=self._name)
            for index in range(request.num_samples)
        ]

    @contextmanager
    def _answering(self, members: Sequence[Member]) -> Iterator[None]:
        self._members.update(dict.fromkeys(members))
        try:
            yield
        finally:
            for member in members:
                del self._members[member]

    async def _finish_all(self, members: Sequence[Member]) -> list[Completion]:
        tasks = [asyncio.create_task(self._finish(member)) for member in members]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # If one fails, nobody waits for the others.
            for task in tasks:
                task.cancel()

    async def _finish(self, member: Member) -> Completion:
        """See a member through all of its parts."""
        try:
            while not member.is_whole:
                if not member.is_added:
                    await self._pass_gate()
                    await member.add(cache_salt=self._cache_salt())
                await member.take()
        except asyncio.CancelledError:
            if not self._obituary:
                await member.abort()
            raise
        return member.completion

    async def _pass_gate(self) -> None:
        while not self._gate.is_set():
            # It may be shut again before this task runs.
            await self._gate.wait()

    def _cache_salt(self) -> str | None:
        """Where a pause leaves the caches as they are, none is shared across versions."""
        return str(self._version) if self._landing == "keep_kv" else None

    async def _run_together(self, llm: AsyncLLM, members: Sequence[Member]) -> None:
        try:
            await llm.pause_generation(mode="keep", clear_cache=True)
            for member in members:
                await member.add(cache_salt=self._cache_salt())
            # Messages keep their order: vLLM has them all before it reads this one.
            await llm.resume_generation()
            await self._finish_all(members)
        except asyncio.CancelledError:
            if not self._obituary:
                for member in members:
                    await member.abort()
                await llm.resume_generation()
            raise

    async def _land(self, llm: AsyncLLM) -> None:
        is_cache_kept = self._landing == "keep_kv"
        await llm.pause_generation(mode=_PAUSES[self._landing], clear_cache=not is_cache_kept)
        if is_cache_kept:
            # They have the salt of these weights and would begin under the next: they are added anew, with theirs.
            for member in tuple(self._members):
                if member.has_no_token:
                    await member.abort()

    # --- weights ----------------------------------------------------------------------------------------------------

    async def _update(self, llm: AsyncLLM, publication: Publication) -> WeightVersion:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"publication": encode(publication)}))
        await llm.finish_weight_update(weight_version=str(publication.version.number))
        (held,) = await llm.collective_rpc("held_version")
        return decode(bytes(held), WeightVersion)

    async def _score(self, llm: AsyncLLM, ids_BT: np.ndarray) -> Canary:
        answers = await llm.collective_rpc("score_rows", args=(ids_BT.tolist(),))
        (logprobs,) = (answer for answer in answers if answer is not None)
        if not logprobs:
            return Canary(ids_BT=ids_BT[:0], logprobs_BT=np.zeros((0, 0), dtype=np.float32))
        return Canary(ids_BT=ids_BT, logprobs_BT=np.array(logprobs, dtype=np.float32))

    # --- life and death ---------------------------------------------------------------------------------------------

    def _living(self) -> AsyncLLM:
        if self._obituary or self._llm is None:
            raise EngineDiedError(self._obituary)
        return self._llm

    async def _call(
        self, what: str, work: Coroutine[Any, Any, T], *, into: type[FourstrokeError] = EngineDiedError
    ) -> T:
        """Await a call to vLLM, but no longer than its core process lives."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        try:
            with boundary(f"{self._name}, {what}", into):
                return await task
        except asyncio.CancelledError:
            # Ours, from _on_death, unless somebody cancelled the caller.
            caller = asyncio.current_task()
            if self._obituary and not (caller and caller.cancelling()):
                raise EngineDiedError(self._obituary) from None
            raise
        except FourstrokeError as error:
            if self._llm is None or self._llm.errored:
                # vLLM says that its core is going before the kernel says how it went.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_GRACE_S):
                        await self._buried.wait()
                raise EngineDiedError(self._obituary or f"{self._name} died{self._see_log()}: {error}") from error
            # Of what our code in the core process raised, vLLM hands on the text alone, behind words of its own.
            if sentence := str(error.__cause__).partition(_RAISED_IN_CORE)[2]:
                raise into(f"{self._name}: {sentence}") from error
            raise
        finally:
            self._tasks.discard(task)

    def _watch(self, process: BaseProcess) -> None:
        assert process.pid is not None, process
        descriptor = os.pidfd_open(process.pid)
        self._watched[descriptor] = process
        asyncio.get_running_loop().add_reader(descriptor, self._on_death, descriptor)

    def _on_death(self, descriptor: int) -> None:
        """The kernel says that a watched process ended."""
        process = self._unwatch(descriptor)
        self._bury(process, num_looks=_NUM_LOOKS)

    def _bury(self, process: BaseProcess, *, num_looks: int) -> None:
        code = process.exitcode
        if code is None and num_looks > 1:
            # A thread of vLLM has just reaped the process and is about to note its status.
            asyncio.get_running_loop().call_later(_POLL_S, lambda: self._bury(process, num_looks=num_looks - 1))
            return
        how = "ended" if code is None else f"ended with signal {-code}" if code < 0 else f"ended with status {code}"
        who = f"{self._name}: process {process.name} ({process.pid})"
        self._obituary = self._obituary or f"{who} {how}{self._see_log()}"
        self._buried.set()
        for task in tuple(self._tasks):
            task.cancel()

    def _unwatch(self, descriptor: int) -> BaseProcess:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        return self._watched.pop(descriptor)

    def _kill(self) -> None:
        self._adopt()
        for process in self._processes:
            process.kill()
            process.join()
            assert process.pid is not None, process
            forget_openmp(process.pid)

    def _see_log(self) -> str:
        return f" (log: {self._log_path})" if self._log_path else ""


def _vocab_size(model_path: Path) -> int:
    """Ids that the model has an embedding for."""
    config = json.loads((model_path / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def _openmp_library() -> Path | None:
    """Intel's OpenMP, which vLLM's CPU build brings into the environment's ``lib``; there is none elsewhere."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return library if library.exists() else None


def _logging_config(log_path: Path | None) -> dict[str, Any]:
    """The logger of vLLM: everything into the file, or errors alone to the terminal."""
    if log_path is None:
        handler: dict[str, Any] = {"class": "logging.StreamHandler", "level": "ERROR"}
    else:
        handler = {"class": "logging.FileHandler", "filename": str(log_path), "level": "INFO"}
    line = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": line}},
        "handlers": {"vllm": {**handler, "formatter": "line"}},
        "loggers": {
            "vllm": {"handlers": ["vllm"], "level": "INFO", "propagate": False},
            _TRITON_LOGGER: {"level": "ERROR"},
        },
    }


@contextmanager
def _set_for_children(variables: dict[str, str]) -> Iterator[None]:
    """Set variables that the user has not set, and take them away again: they are for vLLM and its core process."""
    # A value that nobody sets tells ours from the user's, without reading a variable.
    ours = [name for name in variables if os.environ.setdefault(name, _NOT_SET) == _NOT_SET]
    for name in ours:
        os.environ[name] = variables[name]
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
