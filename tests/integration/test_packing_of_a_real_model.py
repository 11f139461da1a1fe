"""Gradients of packed rows with shared beginnings on the real 135M model, held to the rounding of plain layouts.

Two plain layouts of the same rows differ by rounding alone: padded together through plain matrices, and one at a time
through torch's fused kernel. That difference is measured here, and the packed gradient may be three times as far from
the unpadded one. (Through one kernel, both plain layouts make the same errors, which then say nothing of the rounding:
each is six times as far from the float64 gradient as they are from each other.) Against float64 itself the packed
gradient's worst parameter may be no worse than twice the worst one of the plain layouts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fourstroke.config import process_settings
from fourstroke.trainer.catalogue import resolve_model
from fourstroke.trainer.model import PolicyModel
from fourstroke.trainer.packing import assemble

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_PROMPT = 24
MODEL = "smollm2-135m-instruct"


def rows() -> list[np.ndarray]:
    """Two groups of ragged replies, three levels deep where replies begin alike, and a reply of one token."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(2):
        prompt, middle = rng.integers(100, 40_000, NUM_PROMPT), rng.integers(100, 40_000, 9)
        replies = [rng.integers(100, 40_000, size) for size in (1, 7, 12, 20)]
        made += [np.concatenate([prompt, reply]) for reply in replies]
        made += [np.concatenate([prompt, middle, rng.integers(100, 40_000, size)]) for size in (3, 11)]
    return made


def loss_of(logprobs: list[Tensor]) -> Tensor:
    """A sum in which every row has a weight of its own, of both signs, as advantages have."""
    weights = np.random.default_rng(1).standard_normal(len(logprobs))
    return torch.stack([float(weight) * row.sum() for weight, row in zip(weights, logprobs, strict=True)]).sum()


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def plain(layout: list[list[np.ndarray]], dtype: torch.dtype, *, attention: str = "sdpa") -> dict[str, Tensor]:
    """Gradient through transformers' own attention; rows of a part are padded on the right to its longest."""
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(MODEL, cache_dir=process_settings().cache_dir), dtype=dtype, attn_implementation=attention
    )
    logprobs = []
    for part in layout:
        ids_BT = torch.zeros(len(part), max(map(len, part)), dtype=torch.int64)
        for index, row in enumerate(part):
            ids_BT[index, : len(row)] = torch.from_numpy(row)
        logits_BTV = model(ids_BT, use_cache=False).logits
        for index, row in enumerate(part):
            logprobs_TV = _wide(logits_BTV[index, NUM_PROMPT - 1 : len(row) - 1]).log_softmax(-1)
            logprobs.append(logprobs_TV.gather(-1, ids_BT[index, NUM_PROMPT : len(row), None])[:, 0])
    loss_of(logprobs).backward()  # type: ignore[no-untyped-call]
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def packed(dtype: torch.dtype) -> dict[str, Tensor]:
    model = PolicyModel.load(
        resolve_model(MODEL, cache_dir=process_settings().cache_dir), compute_dtype=dtype, device=torch.device("cpu")
    )
    together = assemble(rows())
    assert len(together.ids_T) < 0.6 * sum(map(len, rows()))
    sources = np.concatenate([slots[NUM_PROMPT - 1 : -1] for slots in together.slots])
    targets = np.concatenate([row[NUM_PROMPT:] for row in rows()])
    logprobs_N, _ = model.token_logprobs(together, sources, targets, temperature=1.0)
    loss_of(list(logprobs_N.split([len(row) - NUM_PROMPT for row in rows()]))).backward()  # type: ignore[no-untyped-call]
    return {name: master.grad for name, master in model.masters.items() if master.grad is not None}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[float]:
    """Relative difference of each parameter's gradient."""
    assert found.keys() == expected.keys()
    return [
        float((found[name].double() - gradient.double()).norm() / gradient.double().norm())
        for name, gradient in expected.items()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_gradient_is_as_near_as_plain_ones_are_to_each_other(dtype: torch.dtype) -> None:
    one_by_one, together = plain([[row] for row in rows()], dtype), plain([rows()], dtype, attention="eager")
    ours = packed(dtype)
    exact = plain([[row] for row in rows()], torch.float64)

    rounding, found = differences(together, one_by_one), differences(ours, one_by_one)
    errors = {"packed": ours, "unpadded": one_by_one, "padded": together}
    worst = {name: max(differences(gradient, exact)) for name, gradient in errors.items()}
    print(f"{dtype}: packed {max(found):.2e} (median {np.median(found):.2e}), ")  # noqa: T201
    print(f"plain {max(rounding):.2e} ({np.median(rounding):.2e}); from float64 {worst}")  # noqa: T201
    assert max(found) <= 3 * max(rounding)
    assert np.median(found) <= 3 * np.median(rounding)
    assert worst["packed"] <= 2 * max(worst["unpadded"], worst["padded"])
