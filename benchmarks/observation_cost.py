"""Claim: watching a quickstart costs under 2 % of a step.

    python benchmarks/observation_cost.py       about half a minute

CPU seconds of everything that a run does only so that somebody can see it, over the seconds of a quickstart step, as if
nothing went on beside it:

    share_of_step = (records + events + waits + terminal + memory + entropy) / seconds of a quickstart step

    records    the step's measures from its groups and passes, reduced, and a line in ``metrics.jsonl``
    events     lines in ``events.jsonl``, as many as the real controller writes for a step
    waits      ``waits.json``, each second
    terminal   the live view redrawn for the step
    memory     the resident sets of the tree each second, and one walk for the proportional set a step: assumed, since a
               real run walks when the resident set is 1 % above its last high, which is seldom once it trains
    entropy    of each loss token, which the trainer computes for the record alone

What the sinks cost is listed beside it, since none is on by default: the driver's part of handing a step to four of
them, and TensorBoard's own work, where it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from controller import NUM_STEPS, make_record, make_tasks, started, step_seconds, waits_cpu_ms
from report import ROOT, report
from rich.console import Console

from fourstroke.algorithms import LossMetric, needs_gradient
from fourstroke.config import RunConfig, SinksConfig
from fourstroke.observability import Event, EventKind, LiveReporter, MetricBook, utc_now
from fourstroke.observability.memory import tree_pss_bytes, tree_rss_bytes
from fourstroke.observability.sinks import SinkFeed, SinkSite
from fourstroke.orchestration import measures
from fourstroke.orchestration.batching import build_batches
from fourstroke.recipes import RECIPES
from fourstroke.store import Audit, RunFolder
from fourstroke.types import Assignment, BatchRecord, Draw, GroupRecord, Microbatch, StepStats

CLAIM = "watching a quickstart costs under 2 % of a step"
NUM_TIMES = 200
NUM_PROCESSES = 12
WALKED_BYTES = 2**29
VOCABULARY = 49_152
CHUNK_TOKENS = 256


def cpu_ms(work: Callable[[], object], *, num_times: int = NUM_TIMES) -> float:
    """CPU milliseconds of this process for one call, once warm."""
    work()
    began = time.process_time()
    for _ in range(num_times):
        work()
    return 1e3 * (time.process_time() - began) / num_times


def make_groups(config: RunConfig) -> list[GroupRecord]:
    """The groups of one step."""
    rollout = config.rollout
    tasks = make_tasks(rollout.groups_per_step)
    return [
        make_record(
            Assignment(
                draw=Draw(epoch=0, index=index, task_id=task.id, seed=index),
                task=task,
                num_samples=rollout.group_size,
                admitted_version=0,
                incarnation=0,
                attempt=0,
            )
        )
        for index, task in enumerate(tasks)
    ]


def make_batch(config: RunConfig, groups: list[GroupRecord]) -> tuple[BatchRecord, list[Microbatch], int]:
    """The step's batch, its micro-batches (as the controller's benchmark finds them, seven), and loss tokens seen."""
    (batch,) = build_batches(groups, step=1, algorithm=config.algorithm, max_tokens=config.rollout.max_tokens)
    seen = needs_gradient(batch.rows, config=config.algorithm)
    microbatches = [Microbatch(rows=tuple(seen[start::7])) for start in range(7)]
    return batch, microbatches, sum(batch.rows[position].num_loss_tokens for position in seen)


def measured(groups: list[GroupRecord], batch: BatchRecord, microbatches: list[Microbatch]) -> dict[str, float]:
    """The record of one step, as the controller puts it together."""
    book = MetricBook(step=1)
    for group in groups:
        measures.add_rollout(book, group)
    measures.add_throughput(book, num_tokens=800, seconds=5.0)
    measures.add_groups(book, groups, trained_at=0)
    sums = dict.fromkeys((metric.value for metric in LossMetric), 0.5)
    passes = [StepStats(sums=sums, num_tokens=80) for _ in microbatches]
    measures.add_passes(book, num_rows=len(batch.rows), microbatches=microbatches, passes=passes)
    measures.add_update(book, StepStats(sums={"grad_norm": 1.0, "learning_rate": 1e-5}, num_tokens=0))
    for name in ("step_s", "wait_s", "rollout_s", "train_s", "publish_s"):
        book.add(f"time/{name}", 1.0)
    measures.add_ledger(book, AUDIT, num_to_come=0)
    return book.record()


AUDIT = Audit(
    drawn=32, trained=16, dropped=0, pending=16, balanced=True, dropped_by_reason={}, attempts=32, attempts_used=16,
    attempts_dropped=0, attempts_pending=16, attempts_dropped_by_reason={}, late=0, lags={0: 16}, max_lag=0,
    incarnations=1,
)  # fmt: skip


def files_cpu_ms(record: Mapping[str, float]) -> tuple[float, float]:
    """CPU milliseconds to append a record, and an event."""
    event = Event(
        kind=EventKind.WEIGHTS_LANDED, time_s=12.5, fields={"version": 3, "engine": "engine-0", "seconds": 0.4}
    )
    with tempfile.TemporaryDirectory() as runs:
        folder = RunFolder.create(RunConfig(runs_dir=runs), now=utc_now())
        with contextlib.closing(folder):
            return cpu_ms(lambda: folder.append_metrics(record)), cpu_ms(lambda: folder.append_event(event))


async def events_a_step() -> float:
    """Events that the real controller tells of a step when all goes well."""
    config = RECIPES["quickstart"]().model_copy(update={"num_steps": NUM_STEPS})
    async with started(config) as run:
        await run.train()
        return run.num_events / NUM_STEPS


def terminal_cpu_ms(record: Mapping[str, float]) -> float:
    """CPU milliseconds to redraw the live view, full."""
    with contextlib.closing(LiveReporter(Console(file=io.StringIO(), force_terminal=True, width=100))) as reporter:
        reporter.phase("train", total=NUM_TIMES)
        return cpu_ms(lambda: reporter.step(7, total=NUM_TIMES, record=record, eta_s=61.0))


def memory_cpu_ms() -> dict[str, float]:
    """CPU milliseconds to look at the resident sets of a tree, and for a GiB of one to be walked."""
    idle = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    touch = f"x = bytearray({WALKED_BYTES}); x[::4096] = bytes({WALKED_BYTES // 4096}); print(flush=True)"
    large = [sys.executable, "-c", f"import sys; {touch}; sys.stdin.read()"]
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_PROCESSES):
            stack.enter_context(subprocess.Popen(idle, stdin=subprocess.PIPE))
        look_ms = cpu_ms(lambda: tree_rss_bytes(os.getpid()), num_times=20)
        walked = stack.enter_context(subprocess.Popen(large, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert walked.stdout is not None
        walked.stdout.readline()
        walk_ms = cpu_ms(lambda: tree_pss_bytes(walked.pid), num_times=10)
    return {"look_cpu_ms": look_ms, "walk_cpu_ms_per_gib": walk_ms * 2**30 / WALKED_BYTES}


def entropy_cpu_ms(num_tokens: int) -> float:
    """CPU milliseconds that the entropy adds to the head, where the exponentials and their sum are there anyway."""
    logits_CV = torch.randn(CHUNK_TOKENS, VOCABULARY)
    weights_CV, sum_C = logits_CV.exp(), logits_CV.exp().sum(-1)
    chunk_ms = cpu_ms(lambda: sum_C.log() - weights_CV.mul(logits_CV).sum(-1) / sum_C, num_times=10)
    return chunk_ms * num_tokens / CHUNK_TOKENS


def sinks_cpu_ms(record: Mapping[str, float]) -> dict[str, float]:
    """CPU milliseconds a step to hand it to four sinks that take all, and for TensorBoard to write it."""

    class Taker:
        def numbers(self, step: int, values: Mapping[str, float]) -> None:
            del step, values

        def close(self, *, is_finished: bool) -> None:
            del is_finished

    def fed(folder: str, config: SinksConfig, **make: Any) -> float:
        site = SinkSite(run="demo", folder=Path(folder), settings={}, config=config)
        began = time.process_time()
        feed = SinkFeed(site, **make)
        for step in range(NUM_TIMES):
            feed.record({**record, "step": step})
        asyncio.run(feed.close())
        assert feed.problems() == [], feed.problems()
        return 1e3 * (time.process_time() - began) / NUM_TIMES

    everything = SinksConfig(use=("tensorboard", "wandb", "mlflow", "prometheus"))
    with tempfile.TemporaryDirectory() as folder:
        figures = {"handing_to_four_cpu_ms": fed(folder, everything, make=lambda _name, _site: Taker())}
        if importlib.util.find_spec("tensorboard") is not None:
            figures["tensorboard_cpu_ms"] = fed(folder, SinksConfig(use=("tensorboard",)))
    return figures


def peak_gib() -> float:
    """Memory of a quickstart, as its own benchmark measured it."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "quickstart.json").read_text())["figures"]["runs"]
    return float(max(run["peak_memory_bytes"] for run in runs)) / 2**30


def main() -> None:
    """Measure, and judge the claim."""
    config, step_s = RECIPES["quickstart"](), step_seconds()
    groups = make_groups(config)
    batch, microbatches, num_tokens = make_batch(config, groups)
    record = measured(groups, batch, microbatches)
    line_ms, event_ms = files_cpu_ms(record)
    num_events, memory = asyncio.run(events_a_step()), memory_cpu_ms()
    parts = {
        "records_cpu_ms": cpu_ms(lambda: measured(groups, batch, microbatches)) + line_ms,
        "events_cpu_ms": num_events * event_ms,
        "waits_cpu_ms": step_s * asyncio.run(waits_cpu_ms()),
        "terminal_cpu_ms": terminal_cpu_ms(record),
        "memory_cpu_ms": step_s * memory["look_cpu_ms"] + peak_gib() * memory["walk_cpu_ms_per_gib"],
        "entropy_cpu_ms": entropy_cpu_ms(num_tokens),
    }
    share = sum(parts.values()) / 1e3 / step_s
    figures = {
        "share_of_step": share,
        "parts_of_a_step": {
            "step_seconds": step_s,
            **parts,
            "events": num_events,
            "loss_tokens": num_tokens,
            **memory,
        },
        "beside_it": sinks_cpu_ms(record),
        "holds": {"share_under_0.02": share < 0.02},
    }
    report(CLAIM, figures, into="observation_cost")


if __name__ == "__main__":
    main()
