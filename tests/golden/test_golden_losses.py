"""Losses, gradients and sums of fixed random inputs, as written down when they were checked; a refactor keeps them.

``python tests/golden/test_golden_losses.py`` writes ``losses.json`` again, for a change that is meant to change them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fourstroke.algorithms.advantages import group_advantages
from fourstroke.algorithms.aggregation import token_weights
from fourstroke.algorithms.inputs import LossInputs
from fourstroke.algorithms.losses import bind_loss
from fourstroke.config import AlgorithmConfig

GOLDEN = Path(__file__).with_name("losses.json")
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "dr_grpo": {"name": "dr_grpo"},
    "grpo, dual clip": {"name": "grpo", "dual_clip": 1.5},
    "grpo, sequence correction and mean": {"name": "grpo", "correction": "sequence", "aggregation": "sequence_mean"},
    "grpo, no correction": {"name": "grpo", "correction": "none", "clip_low": 0.0},
}


def compute(terms: dict[str, Any]) -> dict[str, Any]:
    """From scores to gradient on 12 rows of 3 groups, in float64 on one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = AlgorithmConfig.model_validate(terms)
    # Plain formulas and not a generator, so that the inputs are the same with any version of NumPy.
    num_tokens_B = np.array([1 + (7 * row) % 5 for row in range(12)])
    scores_B = np.array([(5 * row // 3) % 3 / 2 for row in range(12)])
    advantages_B = np.zeros(12)
    for group in range(3):
        advantages_B[group::3] = group_advantages(scores_B[group::3], kind=config.advantage)
    weights_B = token_weights(num_tokens_B, kind=config.aggregation, max_tokens=8)
    sequence_N = np.repeat(np.arange(12), num_tokens_B)
    index_N = np.arange(len(sequence_N), dtype=np.float64)
    behaviour_N = -1.5 - np.sin(index_N)
    proximal_N = behaviour_N + 0.9 * np.cos(3 * index_N)
    logprobs_N = torch.from_numpy(proximal_N + 0.6 * np.sin(5 * index_N)).requires_grad_()
    output = bind_loss(config)(
        LossInputs(
            logprobs_N=logprobs_N,
            entropy_N=torch.from_numpy(1 + np.cos(index_N)),
            behaviour_logprobs_N=torch.from_numpy(behaviour_N),
            proximal_logprobs_N=torch.from_numpy(proximal_N),
            advantages_N=torch.from_numpy(advantages_B[sequence_N]),
            weight_N=torch.from_numpy(weights_B[sequence_N]),
            sequence_N=torch.from_numpy(sequence_N),
            row_ids=tuple(f"row-{row}" for row in range(12)),
        )
    )
    (gradient_N,) = torch.autograd.grad(output.loss_sum, logprobs_N)
    torch.set_num_threads(num_threads)
    return {
        "loss": output.loss_sum.item(),
        "gradient": gradient_N.tolist(),
        "sums": {metric.value: value.item() for metric, value in output.sums.items()},
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_losses_are_reproduced(name: str) -> None:
    golden, found = json.loads(GOLDEN.read_text())[name], compute(SETTINGS[name])
    assert found["loss"] == pytest.approx(golden["loss"], rel=1e-12, abs=1e-12)
    assert found["gradient"] == pytest.approx(golden["gradient"], rel=1e-12, abs=1e-12)
    assert found["sums"] == pytest.approx(golden["sums"], rel=1e-12, abs=1e-12)


def test_the_golden_inputs_exercise_every_branch() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert list(golden) == list(SETTINGS)
    assert all(entry["sums"]["clipped"] > 0 for entry in golden.values())
    truncated = {name: entry["sums"]["truncated"] for name, entry in golden.items()}
    assert 0 < truncated["grpo"] != truncated["grpo, sequence correction and mean"] > 0
    assert truncated["grpo, no correction"] == 0
    assert len({entry["loss"] for entry in golden.values()}) == len(golden)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: compute(terms) for name, terms in SETTINGS.items()}, indent=1) + "\n")
