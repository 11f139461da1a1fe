"""The loss does not depend on how the batch was cut: one property of every term and every aggregation.

A step of padded rows is cut in every way that the trainer cuts it: into micro-batches, over ranks, in any order, with
rows left out that the rule for skipping allows, and with rows that have no loss token. Loss and gradient must be those
of the whole step at once. The terms are those of the tables: one that is added without an entry in ``CASES`` fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourstroke.algorithms import selection, token_weights
from fourstroke.algorithms.aggregation import AGGREGATIONS
from fourstroke.algorithms.corrections import CORRECTIONS
from fourstroke.algorithms.inputs import LossInputs, Pairs, masked
from fourstroke.algorithms.losses import LOSSES, WAITING_LOSSES, Loss
from fourstroke.algorithms.terms import TERMS
from fourstroke.config import AlgorithmConfig

NUM_ROWS, LENGTH = 8, 6
COLUMNS = ("logprobs", "entropy", "behaviour_logprobs", "proximal_logprobs", "advantages")
EVERY = settings(deadline=None, max_examples=12)


@dataclass(frozen=True)
class Case:
    """How a term is put to the test: settings, columns beside the usual ones, what carries its gradient, its atoms."""

    terms: dict[str, Any] = field(default_factory=lambda: {"name": "grpo"})
    columns: tuple[str, ...] = ()
    leaf: str = "logprobs"
    has_pairs: bool = False


CASES: dict[str, Case] = {
    "policy_clip": Case({"name": "grpo", "dual_clip": 1.5}),
    "sequence_clip": Case({"name": "gspo", "clip_low": 0.05, "clip_high": 0.05}),
    "geometric_clip": Case({"name": "gmpo", "clip_low": 0.1, "clip_high": 0.1}),
    "clipped_importance": Case({"name": "cispo"}),
    "soft_gate": Case({"name": "sapo"}),
    "divergence_mask": Case({"name": "dppo", "divergence_limit": 0.02}),
    "quadratic": Case({"name": "dro"}),
    "entropy_bonus": Case({"name": "grpo", "entropy_coefficient": 0.3}, leaf="entropy"),
    "sequence_clip_by_token": Case({"name": "gspo", "clip_low": 0.05, "clip_high": 0.05}),
    "covariance_clip": Case(columns=("is_selected",)),
    "covariance_penalty": Case(columns=("is_selected",)),
    "second_moment_mask": Case(columns=("is_selected",)),
    "reference_kl": Case(columns=("reference_logprobs",)),
    "distillation": Case(columns=("teacher_logprobs",)),
    "value_error": Case(columns=("values", "old_values", "returns"), leaf="values"),
    "imitation": Case(),
    "preference": Case(columns=("reference_logprobs",), has_pairs=True),
    "identity_preference": Case(columns=("reference_logprobs",), has_pairs=True),
    "reward_comparison": Case(leaf="row_scores", has_pairs=True),
}


def term_of(name: str) -> Loss:
    return LOSSES[name] if name in LOSSES else WAITING_LOSSES[name][1]


def test_every_term_of_the_tables_is_put_to_the_test() -> None:
    assert set(CASES) == set(LOSSES) | set(WAITING_LOSSES)
    assert not set(LOSSES) & set(WAITING_LOSSES)


@dataclass
class Step:
    """All rows of an optimiser step, padded, with weights that hold its denominators."""

    case: Case
    config: AlgorithmConfig
    mask_BT: Tensor
    columns: dict[str, Tensor]
    weights_B: Tensor
    row_scores_B: Tensor
    selected_BT: Tensor

    @property
    def leaf(self) -> Tensor:
        return self.row_scores_B if self.case.leaf == "row_scores" else self.columns[self.case.leaf]

    def inputs(self, rows: Sequence[int]) -> LossInputs:
        """The micro-batch of these rows."""
        rows_R = torch.tensor(rows, dtype=torch.int64)
        mask_RT = self.mask_BT[rows_R]
        given = {
            f"{name}_N": masked(self.columns[name][rows_R], mask_RT)
            for name in (*COLUMNS, *self.case.columns)
            if name != "is_selected"
        }
        if "is_selected" in self.case.columns:
            given["is_selected_N"] = masked(self.selected_BT[rows_R], mask_RT)
        sequence_N = mask_RT.nonzero()[:, 0]
        pairs = None
        if self.case.has_pairs:
            chosen_P = torch.tensor([place for place, row in enumerate(rows) if row % 2 == 0], dtype=torch.int64)
            weight_P = self.weights_B.new_full((len(chosen_P),), 2 / NUM_ROWS)
            pairs = Pairs(chosen_P=chosen_P, rejected_P=chosen_P + 1, weight_P=weight_P)
        return LossInputs(
            **given,
            weight_N=self.weights_B[rows_R][sequence_N],
            sequence_N=sequence_N,
            row_ids=tuple(f"row-{row}" for row in rows),
            row_scores_B=self.row_scores_B[rows_R] if self.case.leaf == "row_scores" else None,
            pairs=pairs,
        )

    def loss_and_gradient(self, rows: Sequence[int], name: str) -> tuple[Tensor, Tensor]:
        loss_sum = term_of(name)(self.inputs(rows), self.config).loss_sum
        (gradient,) = torch.autograd.grad(loss_sum, self.leaf, allow_unused=True, materialize_grads=True)
        return loss_sum.detach(), gradient


def make_step(
    name: str, *, seed: int, aggregation: str, dtype: torch.dtype, garbage: float = 0.0, **terms: Any
) -> Step:
    """Random rows of 0 to 6 loss tokens with holes; two rows have none, and two rows have no advantage."""
    rng, case = np.random.default_rng(seed), CASES[name]
    config = AlgorithmConfig.model_validate({**case.terms, "aggregation": aggregation, **terms})
    mask_BT = rng.random((NUM_ROWS, LENGTH)) < 0.7
    mask_BT[rng.permutation(NUM_ROWS)[:2]] = False
    advantages_B = rng.standard_normal(NUM_ROWS) * (rng.permutation(NUM_ROWS) > 1)
    logprobs_BT = -rng.gamma(2.0, 0.7, mask_BT.shape) - 0.01

    def near(scale: float) -> np.ndarray:
        return logprobs_BT + scale * rng.standard_normal(mask_BT.shape)

    columns = {
        "logprobs": logprobs_BT,
        "entropy": rng.gamma(2.0, 1.0, mask_BT.shape),
        "behaviour_logprobs": near(0.3),
        "proximal_logprobs": near(0.2),
        "advantages": np.repeat(advantages_B[:, None], LENGTH, axis=1),
        "reference_logprobs": near(0.5),
        "teacher_logprobs": near(0.5),
        "values": rng.standard_normal(mask_BT.shape),
        "old_values": rng.standard_normal(mask_BT.shape),
        "returns": rng.standard_normal(mask_BT.shape),
    }
    selected_BT = np.zeros_like(mask_BT)
    selected_BT[mask_BT] = selection.largest_covariance(
        selection.token_covariances(columns["proximal_logprobs"][mask_BT], columns["advantages"][mask_BT]), fraction=0.3
    )
    weights_B = token_weights(mask_BT.sum(1), kind=aggregation, max_tokens=LENGTH)
    step = Step(
        case=case,
        config=config,
        mask_BT=torch.from_numpy(mask_BT),
        columns={
            column: torch.from_numpy(np.where(mask_BT, values_BT, garbage)).to(dtype).requires_grad_()
            for column, values_BT in columns.items()
        },
        weights_B=torch.from_numpy(weights_B).to(dtype),
        row_scores_B=torch.from_numpy(rng.standard_normal(NUM_ROWS)).to(dtype).requires_grad_(),
        selected_BT=torch.from_numpy(selected_BT),
    )
    for column in step.columns.keys() - {case.leaf}:
        step.columns[column] = step.columns[column].detach()
    return step


def atoms_of(step: Step, name: str, *, skips: bool) -> list[list[int]]:
    """What is never divided: rows, or pairs of rows; without the rows that the rule for skipping takes out."""
    if step.case.has_pairs:
        return [[row, row + 1] for row in range(0, NUM_ROWS, 2)]
    is_scaled = name in TERMS and TERMS[name].scales_with_advantage
    no_advantage_B = (masked_max(step) == 0) if is_scaled and skips else torch.zeros(NUM_ROWS, dtype=torch.bool)
    return [[row] for row in range(NUM_ROWS) if not no_advantage_B[row]]


def masked_max(step: Step) -> Tensor:
    """Largest |advantage| of each row's loss tokens; 0 where there is none."""
    return torch.where(step.mask_BT, step.columns["advantages"].detach().abs(), 0.0).amax(1)


def cut(atoms: list[list[int]], *, num_ranks: int, num_microbatches: int) -> list[list[list[int]]]:
    """Atoms in order -> ranks -> micro-batches; with fewer atoms than places some are empty."""
    ranks = [atoms[rank::num_ranks] for rank in range(num_ranks)]
    return [
        [[row for atom in rank[first::num_microbatches] for row in atom] for first in range(num_microbatches)]
        for rank in ranks
    ]


ways = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "num_ranks": st.sampled_from([1, 2, 4, NUM_ROWS + 1]),  # of the last, one at least is empty
        "num_microbatches": st.sampled_from([1, 2, 4, NUM_ROWS]),
        "order": st.permutations(range(NUM_ROWS)),
        "skips": st.booleans(),
        "correction": st.sampled_from(sorted(CORRECTIONS)),
        "rejection": st.sampled_from(sorted(CORRECTIONS)),
    }
)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["64", "32"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CASES)
@EVERY
@given(way=ways)
def test_any_cut_gives_the_loss_and_gradient_of_the_whole(
    name: str, aggregation: str, dtype: torch.dtype, tolerance: float, way: dict[str, Any]
) -> None:
    corrections = {"correction": way["correction"], "rejection": way["rejection"], "rejection_low": 0.7}
    step = make_step(name, seed=way["seed"], aggregation=aggregation, dtype=dtype, **corrections)
    whole_loss, whole_gradient = step.loss_and_gradient(range(NUM_ROWS), name)
    atoms = atoms_of(step, name, skips=way["skips"])
    shuffled = [atoms[place] for place in way["order"] if place < len(atoms)]

    loss, gradient = torch.zeros((), dtype=dtype), torch.zeros_like(whole_gradient)
    for rank in cut(shuffled, num_ranks=way["num_ranks"], num_microbatches=way["num_microbatches"]):
        accumulated = torch.zeros_like(whole_gradient)
        for rows in rank:
            part_loss, part_gradient = step.loss_and_gradient(rows, name)
            loss, accumulated = loss + part_loss, accumulated + part_gradient
        gradient += accumulated

    scale = max(1.0, float(whole_gradient.abs().max()), abs(float(whole_loss)))
    assert abs(float(loss - whole_loss)) <= tolerance * scale
    assert float((gradient - whole_gradient).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", CASES)
def test_what_is_under_the_mask_changes_no_bit(name: str, garbage: float) -> None:
    clean, dirty = (
        make_step(name, seed=3, aggregation="token_mean", dtype=torch.float32, garbage=filling)
        for filling in (0.0, garbage)
    )

    (loss, gradient), (dirty_loss, dirty_gradient) = (
        step.loss_and_gradient(range(NUM_ROWS), name) for step in (clean, dirty)
    )

    assert loss.numpy().tobytes() == dirty_loss.numpy().tobytes()
    assert gradient.numpy().tobytes() == dirty_gradient.numpy().tobytes()
    assert bool(gradient.isfinite().all())
    if clean.case.leaf != "row_scores":
        assert not bool(gradient[~clean.mask_BT].any())


@pytest.mark.parametrize("name", CASES)
def test_the_step_gives_every_term_something_to_lose(name: str) -> None:
    """Else the property above would hold of zeros."""
    step = make_step(name, seed=3, aggregation="token_mean", dtype=torch.float64)

    loss, gradient = step.loss_and_gradient(range(NUM_ROWS), name)

    assert abs(float(loss)) > 1e-6
    assert int((gradient != 0).sum()) >= 3


# Terms whose gradient is by design another than that of their value, since they hold a factor fixed.
STRAIGHT_THROUGH = {"clipped_importance", "divergence_mask", "sequence_clip_by_token", "reference_kl"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in STRAIGHT_THROUGH])
def test_gradients_equal_finite_differences(name: str) -> None:
    step = make_step(name, seed=5, aggregation="sequence_mean", dtype=torch.float64)
    leaf = step.leaf

    def loss_of(values: Tensor) -> Tensor:
        if step.case.leaf == "row_scores":
            step.row_scores_B = values
        else:
            step.columns[step.case.leaf] = values
        return term_of(name)(step.inputs(range(NUM_ROWS)), step.config).loss_sum

    assert torch.autograd.gradcheck(loss_of, (leaf,), atol=1e-8)
