"""Claim: log-probabilities of 4,096 tokens take at most a quarter of the naive peak memory and 1.1 of its time.

    python benchmarks/head.py

The naive way is ``log_softmax`` of all logits, with the entropy, and autograd's own backward pass. Both run on the same
random hidden states and output matrix (49,152 x 576, bfloat16), each in processes of its own, so that a peak is one of
this way alone: resident memory at its highest, less what was resident before the pass. Pairs of runs, their medians.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from report import report
from torch import Tensor

from fourstroke.trainer.head import token_logprobs

CLAIM = "head: at 4,096 rows at most 25 % of the naive peak memory at no more than 1.1 of its time"
NUM_ROWS, WIDTH, VOCABULARY, NUM_PAIRS, NUM_PASSES = 4096, 576, 49_152, 3, 3


def naive(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once."""
    logprobs_NV = torch.log_softmax((hidden_NH @ weight_VH.T).float(), -1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N


def fused(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Ours."""
    return token_logprobs(hidden_NH, weight_VH, targets_N, temperature=1.0)


WAYS = {"naive": naive, "fused": fused}


def measure(way: str) -> dict[str, float]:
    """Seconds of a pass forward and backward (median), bytes that it took at its peak, and the gradient's norm."""
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(NUM_ROWS, WIDTH, generator=generator).bfloat16().requires_grad_()
    weight_VH = (torch.randn(VOCABULARY, WIDTH, generator=generator) / WIDTH**0.5).bfloat16().requires_grad_()
    targets_N = torch.randint(0, VOCABULARY, (NUM_ROWS,), generator=generator)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(NUM_PASSES):
        hidden_NH.grad = weight_VH.grad = None
        start = time.perf_counter()
        WAYS[way](hidden_NH, weight_VH, targets_N)[0].sum().backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    assert hidden_NH.grad is not None
    return {
        "seconds": statistics.median(times),
        "peak_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        "gradient_norm": float(hidden_NH.grad.float().norm()),
    }


def in_process(way: str) -> dict[str, float]:
    """The same in a new process."""
    done = subprocess.run([sys.executable, __file__, way], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure pairs and judge the claim."""
    if sys.argv[1:]:
        print(json.dumps(measure(sys.argv[1])))
        return
    pairs = [{way: in_process(way) for way in WAYS} for _ in range(NUM_PAIRS)]

    def ratio(name: str) -> float:
        return statistics.median(pair["fused"][name] / pair["naive"][name] for pair in pairs)

    figures = {
        "memory_of_naive": ratio("peak_bytes"),
        "time_of_naive": ratio("seconds"),
        "gradient_norm_of_naive": ratio("gradient_norm"),
        "pairs": pairs,
        "holds": {"memory": ratio("peak_bytes") <= 0.25, "time": ratio("seconds") <= 1.1},
    }
    report(CLAIM, figures, into="head")


if __name__ == "__main__":
    main()
