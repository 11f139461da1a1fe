"""Claim: 10,000 rows are planned in a second, with at most 3 % more micro-batches than must be, for 2 % of a step.

    python benchmarks/packing.py

Rows are lognormal in length, at most a quarter of the budget; the floor is ``ceil(sum / budget)`` micro-batches. The
step is that of the quickstart: its 128 rows are planned, packed and laid out, beside one forward and backward pass of
the same micro-batches of the real model in the same process. Each figure is a median.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from report import report

from fourstroke.config import process_settings
from fourstroke.recipes import quickstart
from fourstroke.trainer.attention import layout_of
from fourstroke.trainer.catalogue import resolve_model
from fourstroke.trainer.model import PolicyModel
from fourstroke.trainer.packing import Packed, assemble, plan

CLAIM = "packing: 10,000 rows planned a second, within 3 % of ceil(sum / budget), under 2 % of a step"
NUM_ROWS, BUDGET = 10_000, 8192
NUM_PROMPT_TOKENS, NUM_REPLY_TOKENS = 26, (8, 24)


def seconds(work: Callable[[], Any], *, repeats: int = 9) -> float:
    """Median time of a piece of work, after one for warming up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def plan_figures() -> dict[str, float]:
    """Speed and waste of plans of many rows."""
    rates, excesses = [], []
    for seed in range(5):
        lengths = np.random.default_rng(seed).lognormal(6.0, 0.9, NUM_ROWS).astype(int).clip(1, BUDGET // 4).tolist()
        microbatches = plan(lengths, max_tokens=BUDGET)
        excesses.append(len(microbatches) / math.ceil(sum(lengths) / BUDGET) - 1)
        rates.append(NUM_ROWS / seconds(lambda lengths=lengths: plan(lengths, max_tokens=BUDGET), repeats=3))
    return {"rows_per_second": statistics.median(rates), "excess_microbatches": max(excesses)}


def quickstart_rows(*, num_groups: int, group_size: int) -> tuple[list[np.ndarray], list[int]]:
    """Rows of random ids in the lengths of a quickstart step, and what each shares with the one before."""
    rng = np.random.default_rng(0)
    rows, shared = [], []
    for _ in range(num_groups):
        prompt = rng.integers(10, 49_000, NUM_PROMPT_TOKENS)
        for member in range(group_size):
            rows.append(np.concatenate([prompt, rng.integers(10, 49_000, rng.integers(*NUM_REPLY_TOKENS))]))
            shared.append(NUM_PROMPT_TOKENS if member else 0)
    return rows, shared


def pass_through(model: PolicyModel, rows: list[np.ndarray], packed: Packed) -> None:
    """Forward and backward of one micro-batch, all replies in the loss."""
    sources = np.concatenate([slots[NUM_PROMPT_TOKENS - 1 : -1] for slots in packed.slots])
    targets = np.concatenate([row[NUM_PROMPT_TOKENS:] for row in rows])
    model.token_logprobs(packed, sources, targets, temperature=1.0)[0].sum().backward()  # type: ignore[no-untyped-call]


def step_figures() -> dict[str, float]:
    """What packing costs in a step of the quickstart."""
    config = quickstart()
    torch.set_num_threads(2)
    path = resolve_model(config.model.name, cache_dir=process_settings().cache_dir)
    model = PolicyModel.load(path, compute_dtype=torch.bfloat16, device=torch.device("cpu"))
    rows, shared = quickstart_rows(num_groups=config.rollout.groups_per_step, group_size=config.rollout.group_size)
    lengths, budget = [len(row) for row in rows], config.trainer.microbatch_tokens

    def pack() -> list[tuple[list[np.ndarray], Packed]]:
        parts = [[rows[row] for row in part.rows] for part in plan(lengths, shared=shared, max_tokens=budget)]
        packed = [(part, assemble(part)) for part in parts]
        for _, each in packed:
            layout_of(each.segments, device=torch.device("cpu"))
        return packed

    microbatches = pack()
    pack_s = seconds(pack)
    passes_s = seconds(lambda: [pass_through(model, *each) for each in microbatches], repeats=3)
    return {
        "pack_ms": 1000 * pack_s,
        "passes_s": passes_s,
        "share_of_step": pack_s / (pack_s + passes_s),
        "tokens_of_plain_rows": sum(lengths),
        "tokens_packed": sum(len(each.ids_T) for _, each in microbatches),
    }


def main() -> None:
    """Measure both and judge the claim."""
    figures: dict[str, Any] = {**plan_figures(), **step_figures()}
    figures["holds"] = {
        "rows_per_second": figures["rows_per_second"] >= NUM_ROWS,
        "excess_microbatches": figures["excess_microbatches"] <= 0.03,
        "share_of_step": figures["share_of_step"] < 0.02,
    }
    report(CLAIM, figures, into="packing")


if __name__ == "__main__":
    main()
