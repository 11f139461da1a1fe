"""Claim: the control plane costs the quickstart under 1 % of a step, and holds 10,000 episodes in flight.

    python benchmarks/controller.py       about a minute

The real controller, buffer, roller, ledger (on a real file), pool, fleet, watch, metrics and events run on the real
event loop around parts that answer at once, by way of the codec, as placed parts do. CPU seconds are those of this
process; what belongs to a part's side of a call (encoding its answer) is taken out.

    share_of_step = (loops + calls + each second's duties) / seconds of a quickstart step

    loops     all of the above, for one step of the quickstart
    calls     actor calls of one step x CPU seconds of the driver for a call of a real Ray actor: those to workers
              together, all others alone
    duties    the looks at engine, worker and trainer, ``waits.json`` and Ray's idle threads, each second

The memory sampler and the processes that Ray itself runs are no part of the share, and are listed beside it.

``events_per_second`` counts seven moves of a group (admitted, begun, stored, trained in the ledger; expected, finished,
taken in the buffer) and each line of ``events.jsonl``, for each CPU second, while nothing else is to do.
``bytes_per_episode`` is what Python holds for an episode in flight: while it is rolled out (the draw, its attempt, the
task that waits) and once it is finished (its record), the larger of the two; what Ray holds of a call is not seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import ray
from report import ROOT, report

from fourstroke.algorithms import LossMetric
from fourstroke.config import RunConfig, load_config
from fourstroke.engines.vllm import CHECKPOINT
from fourstroke.observability import Event, Waits, WaitsReport, utc_now
from fourstroke.observability.memory import tree_rss_bytes
from fourstroke.orchestration.placement import Cluster, RemoteSampler
from fourstroke.orchestration.training_run import Site
from fourstroke.recipes import RECIPES
from fourstroke.store import RunFolder
from fourstroke.testing.run import FakeRun
from fourstroke.types import (
    Assignment,
    BatchRecord,
    Canary,
    Completion,
    Engine,
    EpisodeRecord,
    GroupRecord,
    Message,
    Microbatch,
    PayloadReference,
    Publication,
    RefusedGroup,
    RowShape,
    SampleRequest,
    Scored,
    StepStats,
    StopReason,
    Task,
    VersionRun,
    Wait,
    WeightVersion,
    decode,
    decode_either,
    encode,
)

CLAIM = "the control plane costs the quickstart under 1 % of a step"
NUM_STEPS = 40
NUM_WATCHED = 3
IDLE_S = 5.0
PAUSE_S = 0.1
MOVES_OF_A_GROUP = 7
PROMPT_TOKENS = 28
CANARY = Canary(ids_BT=np.zeros((4, 64), np.int32), logprobs_BT=np.full((4, 63), -1.0, np.float32))


@dataclass
class Elsewhere:
    """CPU seconds that belong to the parts, and the calls that they took."""

    cpu_s: float = 0.0
    num_calls: int = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """What is done inside is a part's work."""
        began = time.process_time()
        try:
            yield
        finally:
            self.cpu_s += time.process_time() - began


class InstantEngine:
    """An engine that takes every publication and is never asked for a token: workers answer by themselves."""

    def __init__(self, name: str, elsewhere: Elsewhere) -> None:
        self.name = name
        self.version = CHECKPOINT
        self._elsewhere = elsewhere

    async def start(self) -> None:
        """Be ready."""

    async def generate(self, request: SampleRequest) -> tuple[Completion, ...]:
        """Nobody asks."""
        raise AssertionError(request.id)

    async def generate_together(self, requests: Sequence[SampleRequest]) -> tuple[tuple[Completion, ...], ...]:
        """Nobody asks."""
        raise AssertionError(len(requests))

    async def pause(self) -> None:
        """Nothing runs."""
        self._elsewhere.num_calls += 1

    async def update_weights(self, publication: Publication) -> WeightVersion:
        """Take the version."""
        self._elsewhere.num_calls += 1
        message = encode(publication)
        with self._elsewhere.working():
            answer = encode(decode(message, Publication).version)
        self.version = decode(answer, WeightVersion)
        return self.version

    async def score(self, ids_BT: np.ndarray) -> Canary:
        """What the trainer says too."""
        assert ids_BT.shape == CANARY.ids_BT.shape
        self._elsewhere.num_calls += 1
        message = encode(CANARY)
        with self._elsewhere.working():
            answer = encode(decode(message, Canary))
        return decode(answer, Canary)

    async def resume(self) -> None:
        """Nothing waits."""
        self._elsewhere.num_calls += 1

    async def check_health(self) -> None:
        """Alive."""

    async def close(self) -> None:
        """Nothing to end."""


class InstantWorker:
    """A worker whose groups are done at once, or as soon as ``gate`` opens."""

    def __init__(self, name: str, elsewhere: Elsewhere, gate: asyncio.Event) -> None:
        self.name = name
        self._elsewhere = elsewhere
        self._gate = gate

    async def start(self) -> None:
        """Be ready."""

    async def route(self, engines: Sequence[Engine]) -> None:
        """Nothing is sampled."""
        del engines
        self._elsewhere.num_calls += 1

    async def run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        """The records of made-up groups."""
        assert not is_together
        self._elsewhere.num_calls += 1
        messages = [encode(assignment) for assignment in assignments]
        await self._gate.wait()
        with self._elsewhere.working():
            answers = [encode(make_record(decode(message, Assignment))) for message in messages]
        return tuple(decode_either(answer, GroupRecord, RefusedGroup) for answer in answers)

    async def check_health(self) -> tuple[Wait, ...]:
        """Alive."""
        return ()

    async def close(self) -> None:
        """Nothing to end."""


class InstantTrainer:
    """A trainer that learns nothing, and begins as soon as ``gate`` opens."""

    def __init__(self, elsewhere: Elsewhere, gate: asyncio.Event) -> None:
        self._elsewhere = elsewhere
        self._gate = gate
        self.num_microbatches = 0

    async def start(self) -> None:
        """Be ready."""

    async def prepare(self, batch: BatchRecord) -> None:
        """Take the batch."""
        await self._gate.wait()
        self._elsewhere.num_calls += 1
        message = encode(batch)
        with self._elsewhere.working():
            decode(message, BatchRecord)

    async def forward_backward(self, update: int, microbatch: Microbatch) -> StepStats:
        """Sums of nothing."""
        assert update == 0
        self._elsewhere.num_calls += 1
        self.num_microbatches += 1
        encode(microbatch)
        with self._elsewhere.working():
            answer = encode(StepStats(sums=dict.fromkeys((m.value for m in LossMetric), 0.0), num_tokens=400))
        return decode(answer, StepStats)

    async def optim_step(self) -> StepStats:
        """Nothing moves."""
        self._elsewhere.num_calls += 1
        with self._elsewhere.working():
            answer = encode(StepStats(sums={"grad_norm": 1.0, "learning_rate": 1e-5}, num_tokens=0))
        return decode(answer, StepStats)

    async def publish(self, number: int, *, incarnation: int) -> Publication:
        """The next version."""
        self._elsewhere.num_calls += 1
        version = WeightVersion(incarnation=incarnation, number=number, digest=f"{number:016x}")
        return Publication(version=version, path="", size_bytes=0, tensors=())

    async def canary(self) -> Canary:
        """The same of all weights."""
        self._elsewhere.num_calls += 1
        with self._elsewhere.working():
            answer = encode(CANARY)
        return decode(answer, Canary)

    async def save(self, folder: str, *, step: int) -> None:
        """Nothing to keep."""
        assert folder
        assert step
        self._elsewhere.num_calls += 1

    async def flush(self) -> None:
        """Nothing to write."""
        self._elsewhere.num_calls += 1

    async def load(self, folder: str) -> int:
        """Nobody asks."""
        raise AssertionError(folder)

    async def export(self, folder: str) -> None:
        """Nobody asks."""
        raise AssertionError(folder)

    async def check_health(self) -> tuple[Wait, ...]:
        """Alive."""
        return ()

    async def close(self) -> None:
        """Nothing to end."""


class InstantParts:
    """Makes them; behind what ``FakeRun`` asks for."""

    def __init__(self, *, workers_wait: bool = False, trainer_waits: bool = False) -> None:
        self.elsewhere = Elsewhere()
        self.workers_may, self.trainer_may = asyncio.Event(), asyncio.Event()
        if not workers_wait:
            self.workers_may.set()
        if not trainer_waits:
            self.trainer_may.set()
        self.trainers: list[InstantTrainer] = []

    def engine(self, site: Site, name: str, is_replacement: bool) -> InstantEngine:
        """An engine."""
        assert site
        assert not is_replacement
        return InstantEngine(name, self.elsewhere)

    def trainer(self, site: Site) -> InstantTrainer:
        """The trainer."""
        assert site
        self.trainers.append(InstantTrainer(self.elsewhere, self.trainer_may))
        return self.trainers[-1]

    def worker(self, site: Site, name: str) -> InstantWorker:
        """A worker."""
        assert site
        return InstantWorker(name, self.elsewhere, self.workers_may)


def make_record(assignment: Assignment) -> GroupRecord:
    """A record as the quickstart has them: two thirds of the groups have a gradient, and replies of 3 to 10 tokens."""
    draw = assignment.draw
    is_mixed = draw.index % 3 != 0

    def episode(member: int) -> EpisodeRecord:
        score, num_tokens = float(is_mixed and member % 2), 3 + member
        return EpisodeRecord(
            member=member,
            stop=StopReason.FINISHED,
            verdict=Scored(
                score=score,
                components={"equal": score},
                reason="12 is not 15",
                grader="numeric@1c9d22aa",
                cost_s=0.0004,
            ),
            num_sampled_tokens=num_tokens,
            versions=(VersionRun(version=assignment.admitted_version, num_tokens=num_tokens),),
            rows=(
                RowShape(
                    num_tokens=PROMPT_TOKENS + num_tokens,
                    num_loss_tokens=num_tokens,
                    num_shared_tokens=PROMPT_TOKENS if member else 0,
                ),
            ),
            failure="",
        )

    return GroupRecord(
        draw=draw,
        admitted_version=assignment.admitted_version,
        incarnation=assignment.incarnation,
        attempt=assignment.attempt,
        episodes=tuple(episode(member) for member in range(assignment.num_samples)),
        reference=PayloadReference(segment=0, offset=0, length=4000, digest="0123456789abcdef"),
    )


def make_tasks(num_tasks: int) -> list[Task]:
    """Tasks of the quickstart's size."""
    system = Message(role="system", content="Answer briefly.")
    return [
        Task(id=f"{n:016x}", prompt=(system, Message(role="user", content=f"What is {n} + 5?")), answer=str(n + 5))
        for n in range(num_tasks)
    ]


@dataclass
class Run:
    """A run on instant parts in a real run folder."""

    config: RunConfig
    folder: RunFolder
    parts: InstantParts
    fakes: FakeRun
    num_events: int = 0
    tasks: list[Task] = field(default_factory=lambda: make_tasks(400))

    async def train(self) -> None:
        """All steps."""
        await self.fakes.train(self.tasks)


@asynccontextmanager
async def started(config: RunConfig, *, workers_wait: bool = False, trainer_waits: bool = False) -> AsyncIterator[Run]:
    """A run that has started, and ends."""
    with tempfile.TemporaryDirectory() as runs, contextlib.ExitStack() as stack:
        config = config.model_copy(update={"runs_dir": runs})
        folder = RunFolder.create(config, now=utc_now())
        stack.callback(folder.close)
        parts = InstantParts(workers_wait=workers_wait, trainer_waits=trainer_waits)

        def on_event(event: Event) -> None:
            run.num_events += 1
            folder.append_event(event)

        fakes = FakeRun(
            config,
            folder.path,
            parts=parts,  # type: ignore[arg-type]
            on_step=lambda _, record: folder.append_metrics(record),
            on_event=on_event,
        )
        run = Run(config=config, folder=folder, parts=parts, fakes=fakes)
        async with fakes.started():
            yield run


# --- figures --------------------------------------------------------------------------------------------------------


async def loops() -> dict[str, float]:
    """CPU seconds of the control plane for one quickstart step, and the calls that it makes."""
    config = RECIPES["quickstart"]().model_copy(update={"num_steps": NUM_STEPS})
    async with started(config) as run:
        began, elsewhere = time.process_time(), run.parts.elsewhere
        await run.train()
        cpu_s = time.process_time() - began - elsewhere.cpu_s
        audit = run.fakes.ledger.audit()
        assert audit.balanced, audit
        assert audit.trained == NUM_STEPS * config.rollout.groups_per_step, audit
        return {
            "loops_cpu_ms": 1e3 * cpu_s / NUM_STEPS,
            "calls": elsewhere.num_calls / NUM_STEPS,
            "microbatches": run.parts.trainers[0].num_microbatches / NUM_STEPS,
        }


async def saturated() -> float:
    """Events handled for each CPU second while there is always more to do."""
    config = _large(num_groups=1250, num_steps=40)
    async with started(config) as run:
        began, elsewhere = time.process_time(), run.parts.elsewhere
        await run.train()
        cpu_s = time.process_time() - began - elsewhere.cpu_s
        return (run.fakes.ledger.audit().trained * MOVES_OF_A_GROUP + run.num_events) / cpu_s


async def bytes_in_flight(num_episodes: int) -> dict[str, float]:
    """Bytes that Python holds for each of so many episodes, while they are rolled out and once they are finished."""
    config = _large(num_groups=num_episodes // 8, num_steps=100)
    async with started(config, workers_wait=True, trainer_waits=True) as run:
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        training = asyncio.create_task(run.train())
        while run.fakes.ledger.audit().attempts < num_episodes // 8:
            await _a_moment(training)
        rolling = _held() - before
        run.parts.workers_may.set()
        while _num_rolling():
            await _a_moment(training)
        finished = _held() - before
        tracemalloc.stop()
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
    return {"rolling": rolling / num_episodes, "finished": finished / num_episodes}


def _large(*, num_groups: int, num_steps: int) -> RunConfig:
    """A run with so many slots, which are twenty-five steps' groups."""
    return load_config(
        {
            "num_steps": num_steps,
            "rollout": {"groups_per_step": num_groups // 25, "group_size": 8, "max_tokens": 24, "staleness": 24},
            "engine": {"max_model_len": 128},
            "checkpoint": {"every_steps": 10},
        }
    )


async def _a_moment(training: asyncio.Task[None]) -> None:
    """Let the run go on; it is to be still going then."""
    await asyncio.wait([training], timeout=0.1)
    assert not training.done(), training


def _num_rolling() -> int:
    return sum(task.get_name().startswith("group ") for task in asyncio.all_tasks())


def _held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


class Answers:
    """An actor that answers at once."""

    async def generate(self, request: bytes) -> tuple[str, list[bytes]]:
        """Nothing."""
        assert request
        return "ok", []


async def calls() -> dict[str, float]:
    """CPU milliseconds of the driver for calls of a real actor, for a second without any, and to look at memory.

    A call alone, with nothing before it for a moment, wakes Ray's threads and finds cold caches; most calls are of that
    kind, since parts work between them.
    """
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder) / "ray")
        cluster.start()
        try:
            actor = ray.remote(Answers).options(num_cpus=0, max_concurrency=1000).remote()
            engine, request = RemoteSampler("answers", actor), _request()

            async def call(num_together: int, *, pause_s: float, num_times: int) -> float:
                began = time.process_time()
                for _ in range(num_times):
                    await asyncio.gather(*(engine.generate(request) for _ in range(num_together)))
                    await asyncio.sleep(pause_s)
                return 1e3 * (time.process_time() - began) / num_times

            await call(16, pause_s=0.0, num_times=20)
            theirs = psutil.Process().children(recursive=True)
            others_began = _cpu_s(theirs)
            idle_ms = await call(0, pause_s=IDLE_S, num_times=1) / IDLE_S
            others_s = _cpu_s(theirs) - others_began
            together_ms = await call(16, pause_s=0.0, num_times=100) / 16
            alone_ms = await call(1, pause_s=PAUSE_S, num_times=50) - idle_ms * PAUSE_S
            look_ms = await call(NUM_WATCHED, pause_s=PAUSE_S, num_times=50) - idle_ms * PAUSE_S
            began = time.process_time()
            for _ in range(20):
                tree_rss_bytes(os.getpid())
            memory_ms = 1e3 * (time.process_time() - began) / 20
        finally:
            cluster.stop()
    return {
        "call_together_cpu_ms": together_ms,
        "call_alone_cpu_ms": alone_ms,
        "look_cpu_ms_per_second": look_ms,
        "idle_cpu_ms_per_second": idle_ms,
        "memory_cpu_ms_per_second": memory_ms,
        "ray_processes_cpu_ms_per_second": 1e3 * others_s / IDLE_S,
    }


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _request() -> SampleRequest:
    return SampleRequest(
        id="g0",
        prompt_ids=np.arange(PROMPT_TOKENS, dtype=np.int32),
        num_samples=8,
        max_tokens=24,
        temperature=1.0,
        stop_ids=(2,),
        seed=7,
    )


async def waits_cpu_ms() -> float:
    """CPU milliseconds to write ``waits.json`` once, with as many waits as a quickstart has in its rollout."""
    async with started(RECIPES["quickstart"]()) as run:
        waits, stack = Waits("worker-0"), contextlib.ExitStack()
        with stack:
            for number in range(2 * run.config.rollout.groups_per_step):
                stack.enter_context(waits.noted(f"request e0000-i{number:06d}.r0.a0.m0 to be sampled"))
            began = time.process_time()
            for _ in range(200):
                report = WaitsReport(written_unix=0.0, pid=1, phase="train", step=1, waits=waits.now())
                run.folder.write_waits(report)
            return 1e3 * (time.process_time() - began) / 200


def step_seconds() -> float:
    """Seconds of a quickstart step, as its own benchmark measured them."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "quickstart.json").read_text())["figures"]["runs"]
    return float(sum(run["train_seconds"] for run in runs) / sum(run["num_steps"] for run in runs))


def main() -> None:
    """Measure, and judge the claim."""
    step_s = step_seconds()
    loop, call, waits_ms = asyncio.run(loops()), asyncio.run(calls()), asyncio.run(waits_cpu_ms())
    num_together = RECIPES["quickstart"]().rollout.groups_per_step
    calls_ms = num_together * call["call_together_cpu_ms"]
    calls_ms += (loop["calls"] - num_together) * call["call_alone_cpu_ms"]
    duties_ms = step_s * (waits_ms + sum(call[f"{duty}_cpu_ms_per_second"] for duty in ("look", "idle")))
    share = (loop["loops_cpu_ms"] + calls_ms + duties_ms) / 1e3 / step_s
    held = {num: asyncio.run(bytes_in_flight(num)) for num in (10_000, 100_000)}
    figures = {
        "share_of_step": share,
        "parts_of_a_step": {
            "step_seconds": step_s,
            "loops_cpu_ms": loop["loops_cpu_ms"],
            "calls_cpu_ms": calls_ms,
            "duties_cpu_ms": duties_ms,
            "calls": loop["calls"],
            "microbatches": loop["microbatches"],
            "waits_file_cpu_ms_per_second": waits_ms,
            **call,
        },
        "events_per_second": asyncio.run(saturated()),
        "bytes_per_episode": max(held[10_000].values()),
        "bytes_per_episode_in_flight": held,
        "holds": {"share_under_0.01": share < 0.01},
    }
    report(CLAIM, figures, into="controller")


if __name__ == "__main__":
    main()
