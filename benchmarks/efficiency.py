"""Claim: a step of the quickstart takes at most 1.35 times what its work takes alone.

    python benchmarks/efficiency.py            the run, then the floors; about 6 minutes on 2 cores
    python benchmarks/efficiency.py --run DIR  the same of a run that is there

``wall_over_floors`` is the wall time of the run's steps (the first one excepted) over the sum of three floors, each
measured after it on the same tokens, in a process of its own:

    generation   vLLM alone: all requests of a step added at once, replies of the same lengths, nothing read back
    training     forward and backward of the same rows by the best plain loop: Hugging Face's model with its own
                 attention and ``log_softmax``, rows of like lengths padded together, the fastest of several sizes
    copies       the published bytes copied twice between warm buffers

The plain loop sees every row whole, as such loops do. ``wall_over_shared_floors`` is the same with the loop's rate on
the tokens that are left once shared prompts are computed once: it is the stricter of the two, and no goal.

``terms`` are the parts of the wall as the run itself recorded them; they sum to it. ``mfu_blocks`` is the work of the
transformer's blocks, forward and backward, on 4,096 packed tokens over the time that it took, as a share of the fastest
bfloat16 product that this machine showed in the same process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from report import report, run_quickstart
from transformers import AutoModelForCausalLM

from fourstroke.config import process_settings
from fourstroke.store import Ledger, read_metrics, read_payload
from fourstroke.trainer.catalogue import resolve_model
from fourstroke.trainer.model import PolicyModel
from fourstroke.trainer.packing import assemble
from fourstroke.types import Group, Scored

CLAIM = "efficiency: a quickstart step takes at most 1.35 times its generation, training and copies alone"
MODEL = "smollm2-135m-instruct"
NUM_STEPS = 6
NUM_PACKED_TOKENS = 4096
BATCH_ROWS = (16, 32, 64)


class Step(msgspec.Struct):
    """What a step sampled and trained: of each group the prompt, and of each member the reply and whether it trains."""

    prompts: list[list[int]]
    replies: list[list[list[int]]]
    is_mixed: list[bool]


def steps_of(folder: Path) -> dict[int, Step]:
    """The steps of a run, by number."""
    with contextlib.closing(Ledger(folder / "ledger.sqlite", is_read_only=True)) as ledger:
        references = ledger.references()
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        step_of = dict(connection.execute("SELECT key, step FROM draws"))
    steps: dict[int, Step] = defaultdict(lambda: Step(prompts=[], replies=[], is_mixed=[]))
    for key, reference in references.items():
        group = read_payload(folder / "payload", reference, Group)
        episodes = [member.episode for member in group.members]
        scores = {member.verdict.score for member in group.members if isinstance(member.verdict, Scored)}
        step = steps[step_of[key]]
        step.prompts.append(episodes[0].spans[0].ids.tolist())
        step.replies.append([episode.spans[1].ids.tolist() for episode in episodes])
        step.is_mixed.append(len(scores) > 1)
    return steps


# --- floors, each in a process of its own -----------------------------------------------------------------------------


def generation(steps: list[Step]) -> dict[str, Any]:
    """Seconds of each step's replies through vLLM alone."""
    from vllm import LLM, SamplingParams

    model_path = resolve_model(MODEL, cache_dir=process_settings().cache_dir)
    llm = LLM(
        str(model_path),
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=128,
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=2**28,
        block_size=32,
    )
    seconds = []
    for index in (0, *range(len(steps))):
        step = steps[index]
        requests = [
            ({"prompt_token_ids": prompt}, SamplingParams(max_tokens=len(reply), ignore_eos=True, detokenize=False))
            for prompt, replies in zip(step.prompts, step.replies, strict=True)
            for reply in replies
        ]
        llm.reset_prefix_cache()
        started = time.perf_counter()
        llm.generate([prompt for prompt, _ in requests], [each for _, each in requests], use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds[1:]}


def training(steps: list[Step]) -> dict[str, Any]:
    """Seconds of each step's rows by the plain loop, for the number of rows at once that is fastest over all."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(MODEL, cache_dir=process_settings().cache_dir), dtype=torch.bfloat16
    )
    by_size = {size: [_plain_pass(model, step, size=size) for step in (steps[0], *steps)][1:] for size in BATCH_ROWS}
    best = min(by_size, key=lambda size: sum(by_size[size]))
    return {"seconds": by_size[best], "rows_at_once": best, "all": {size: sum(by_size[size]) for size in by_size}}


def rows_of(step: Step) -> list[tuple[int, np.ndarray]]:
    """Length of the prompt and ids of each row that gets a gradient."""
    return [
        (len(prompt), np.array(prompt + reply))
        for prompt, replies, is_mixed in zip(step.prompts, step.replies, step.is_mixed, strict=True)
        if is_mixed
        for reply in replies
    ]


def _plain_pass(model: Any, step: Step, *, size: int) -> float:
    rows = sorted(rows_of(step), key=lambda row: len(row[1]))
    started = time.perf_counter()
    for part in (rows[at : at + size] for at in range(0, len(rows), size)):
        longest, first = max(len(ids) for _, ids in part), min(num_prompt for num_prompt, _ in part)
        ids_BT, mask_BT = torch.zeros(len(part), longest, dtype=torch.int64), torch.zeros(len(part), longest)
        for index, (num_prompt, ids) in enumerate(part):
            ids_BT[index, : len(ids)] = torch.from_numpy(ids)
            mask_BT[index, num_prompt : len(ids)] = 1
        logits_BTV = model(ids_BT, use_cache=False, logits_to_keep=longest - first + 1).logits[:, :-1]
        targets_BT = ids_BT[:, first:]
        logprobs_BT = logits_BTV.float().log_softmax(-1).gather(-1, targets_BT[..., None])[..., 0]
        (logprobs_BT * mask_BT[:, first:]).sum().backward()
    seconds = time.perf_counter() - started
    model.zero_grad(set_to_none=False)
    return seconds


def copies(num_bytes: int) -> float:
    """Seconds of two copies of the published bytes, warm, median of 9."""
    buffers = [np.ones(num_bytes, dtype=np.uint8) for _ in range(3)]
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        np.copyto(buffers[1], buffers[0])
        np.copyto(buffers[2], buffers[1])
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def blocks(_: list[Step]) -> dict[str, Any]:
    """Share of the matmul peak that the blocks reach on 4,096 packed tokens."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = PolicyModel.load(
        resolve_model(MODEL, cache_dir=process_settings().cache_dir),
        compute_dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(16):
        prompt = rng.integers(100, 40_000, 64)
        rows += [np.concatenate([prompt, rng.integers(100, 40_000, 24)]) for _ in range(8)]
    packed = assemble(rows)
    assert len(packed.ids_T) == NUM_PACKED_TOKENS, len(packed.ids_T)
    gradient_TH = torch.randn(NUM_PACKED_TOKENS, 576).bfloat16()

    def one_pass() -> None:
        model.hidden(packed).backward(gradient_TH)

    config = model._working.config  # noqa: SLF001 (sizes of the blocks)
    width, depth, inner = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    key_width = width * config.num_key_value_heads // config.num_attention_heads
    weights = depth * (2 * width * width + 2 * width * key_width + 3 * width * inner)
    pairs = sum(float(len(row) * (len(row) + 1) / 2) for row in rows) - 7 * 16 * 64 * 65 / 2
    work = 6 * weights * NUM_PACKED_TOKENS + 3 * 4 * pairs * width * depth
    one_pass()
    seconds = statistics.median(_seconds(one_pass) for _ in range(3))
    peak = matmul_peak()
    return {
        "mfu_blocks": work / seconds / peak,
        "seconds": seconds,
        "tokens_per_second": NUM_PACKED_TOKENS / seconds,
        "peak_flops": peak,
        "losses": _losses(one_pass),
    }


def matmul_peak() -> float:
    """Most floating-point operations a second of a bfloat16 product, over the shapes of the blocks and larger ones."""
    best = 0.0
    for rows, inner, columns in ((4096, 576, 1536), (4096, 1536, 576), (2048, 2048, 2048), (4096, 4096, 1024)):
        left, right = torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()
        seconds = min(_seconds(lambda left=left, right=right: left @ right.T) for _ in range(12))
        best = max(best, 2 * rows * inner * columns / seconds)
    return best


def _losses(one_pass: Callable[[], None]) -> dict[str, float]:
    """Seconds that a pass spends in each operation of torch, the largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_pass()
    found = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)[:12]
    return {event.key: event.self_cpu_time_total / 1e6 for event in found}


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


PARTS = {"generation": generation, "training": training, "blocks": blocks}


def in_process(part: str, steps: list[Step]) -> dict[str, Any]:
    """One of :data:`PARTS` in a new process, whose threads wait as the trainer's do."""
    done = subprocess.run(
        [sys.executable, __file__, part],
        input=msgspec.json.encode(steps),
        stdout=subprocess.PIPE,
        env={**os.environ, "GOMP_SPINCOUNT": "1000", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def num_shared_tokens(step: Step) -> tuple[int, int]:
    """Tokens of the rows that train, and what is left of them once each prompt is counted once."""
    rows = rows_of(step)
    return sum(len(ids) for _, ids in rows), len(assemble([ids for _, ids in rows]).ids_T) if rows else 0


def main() -> None:
    """Measure and judge the claim."""
    if sys.argv[1:2] and sys.argv[1] in PARTS:
        found = PARTS[sys.argv[1]](msgspec.json.decode(sys.stdin.buffer.read(), type=list[Step]))
        print(json.dumps(found))
        return
    folder = (
        Path(sys.argv[2])
        if sys.argv[1:2] == ["--run"]
        else run_quickstart(num_steps=NUM_STEPS, evaluation__before="false", evaluation__after="false")
    )
    records = {record["step"]: record for record in read_metrics(folder / "metrics.jsonl") if record["step"] > 1}
    steps = [step for number, step in sorted(steps_of(folder).items()) if number in records]
    wall = sum(record["time/step_s"] for record in records.values())
    names = ("time/wait_s", "time/train_s", "time/publish_s")
    terms = {name: sum(record[name] for record in records.values()) for name in names}
    generated, trained, block = (in_process(part, steps) for part in PARTS)
    num_bytes = sum(file.stat().st_size for file in folder.glob("models/*/model.safetensors"))
    floors = {
        "generation": sum(generated["seconds"]),
        "training": sum(trained["seconds"]),
        "copies": len(records) * copies(num_bytes),
    }
    num_tokens, num_left = (sum(counts) for counts in zip(*map(num_shared_tokens, steps), strict=True))
    shared = {**floors, "training": floors["training"] * num_left / num_tokens}
    ratio = wall / sum(floors.values())
    figures = {
        "wall_over_floors": ratio,
        "wall_over_shared_floors": wall / sum(shared.values()),
        "mfu_blocks": block["mfu_blocks"],
        "steps": len(records),
        "wall_s": wall,
        "terms_s": terms,
        "floors_s": floors,
        "trained_tokens": {"of_rows": num_tokens, "prompts_once": num_left},
        "plain_loop": trained,
        "blocks": block,
        "holds": {
            "wall_over_floors": ratio <= 1.35,
            "terms_sum_to_wall": abs(sum(terms.values()) / wall - 1) <= 0.05,
        },
    }
    report(CLAIM, figures, into="efficiency")


if __name__ == "__main__":
    main()
