"""The verbs of the trainer on a tiny model, against an independent reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fourstroke.algorithms.losses import bind_loss
from fourstroke.config import BUNDLES, RunConfig, load_config
from fourstroke.errors import DataError
from fourstroke.trainer import engine
from fourstroke.trainer.engine import TorchTrainer
from fourstroke.trainer.packing import plan
from fourstroke.types import Batch, Column, Microbatch, StepStats, Trajectory

MakeTrainer = Callable[..., TorchTrainer]
MakeBatch = Callable[..., Batch]


@pytest.fixture
def make_trainer(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTrainer]:
    """Trainers of the tiny model, closed at the end; float64 stands in for float32 where exactness is judged."""
    made: list[TorchTrainer] = []

    def make(*overrides: str, compute: str = "float64") -> TorchTrainer:
        if compute == "float64":
            monkeypatch.setitem(engine._DTYPES, "float32", torch.float64)
        dtype = "bfloat16" if compute == "bfloat16" else "float32"
        config: RunConfig = load_config(
            {"trainer": {"compute_dtype": dtype, "num_threads": 1, "learning_rate": 1e-2}}, overrides=overrides
        )
        trainer = TorchTrainer(
            config,
            model_path=tiny_llama,
            publication_path=tmp_path / f"weights-{len(made)}",
            loss=bind_loss(config.algorithm),
        )
        trainer.start()
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


def gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: master.grad.clone() for name, master in trainer._model.masters.items() if master.grad is not None}


def run(
    trainer: TorchTrainer, batch: Batch, cut: list[tuple[int, ...]]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Sums over the micro-batches of a cut, and the gradient that they leave."""
    stats = [trainer.forward_backward(batch, Microbatch(rows=rows)) for rows in cut]
    names = {name for part in stats for name in part.sums}
    sums = {name: sum(part.sums.get(name, 0.0) for part in stats) for name in names}
    return {**sums, "num_tokens": sum(part.num_tokens for part in stats)}, gradients(trainer)


def reference_sums(path: Path, batch: Batch, config: RunConfig) -> dict[str, float]:
    """Loss and ratios row by row through plain transformers in float64, with plain loops."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    loss = abs_log_ratio = 0.0
    for row in batch.rows:
        ids = torch.tensor(row[Column.IDS].astype(np.int64))
        all_TV = torch.log_softmax(model(ids[None]).logits[0] / config.rollout.temperature, -1)
        for t in np.flatnonzero(row[Column.LOSS_MASK]):
            difference = all_TV[t - 1, ids[t]].item() - float(row[Column.BEHAVIOUR_LOGPROBS][t])
            weight = min(math.exp(difference), config.algorithm.correction_cap)
            loss -= float(row[Column.WEIGHT][t]) * weight * float(row[Column.ADVANTAGES][t])
            abs_log_ratio += abs(difference)
    return {"loss": loss, "abs_log_ratio": abs_log_ratio}


def test_the_loss_of_a_step_equals_the_reference(
    make_trainer: MakeTrainer, make_batch: MakeBatch, tiny_llama: Path
) -> None:
    trainer, batch = make_trainer("rollout.temperature=0.7"), make_batch()
    sums, _ = run(trainer, batch, [(0, 1, 2, 3)])
    expected = reference_sums(tiny_llama, batch, trainer._config)
    assert {name: sums[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert sums["num_tokens"] == batch.num_loss_tokens == 13


CUTS = [
    [(0,), (1,), (2,), (3,)],
    [(3, 1), (), (2, 0)],
    [(0, 1), (2, 3)],
    [(2, 3, 0, 1), ()],
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_the_cut_into_micro_batches_does_not_matter(
    make_trainer: MakeTrainer, make_batch: MakeBatch, cut: list[tuple[int, ...]], correction: str
) -> None:
    batch = make_batch()
    whole, whole_gradients = run(make_trainer(f"algorithm.correction={correction}"), batch, [(0, 1, 2, 3)])
    sums, found = run(make_trainer(f"algorithm.correction={correction}"), batch, cut)
    assert sums == pytest.approx(whole, abs=1e-10)
    for name, gradient in whole_gradients.items():
        assert gradient.any()
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", BUNDLES)
def test_the_cut_does_not_matter_to_any_bundle_with_an_entropy_bonus(
    make_trainer: MakeTrainer, make_batch: MakeBatch, name: str
) -> None:
    terms = (f"algorithm.name={name}", "algorithm.entropy_coefficient=0.01")
    trainer = make_trainer(*terms)
    batch = trainer.prepare(make_batch())
    whole, whole_gradients = run(trainer, batch, [(0, 1, 2, 3)])

    sums, found = run(make_trainer(*terms), batch, [(3, 1), (), (2, 0)])

    assert sums == pytest.approx(whole, abs=1e-10)
    for parameter, gradient in whole_gradients.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=1e-10)


def test_the_gradient_of_an_entropy_bonus_equals_that_of_plain_transformers(
    make_trainer: MakeTrainer, make_batch: MakeBatch, tiny_llama: Path
) -> None:
    """The difference that a bonus of 0.5 makes to the gradient, against the entropy of all logits."""
    batch, temperature = make_batch(), 0.7
    overrides = f"rollout.temperature={temperature}"
    _, without = run(make_trainer(overrides), batch, [(0, 1, 2, 3)])
    _, found = run(make_trainer(overrides, "algorithm.entropy_coefficient=0.5"), batch, [(0, 1), (2, 3)])

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for row in batch.rows:
        ids = torch.tensor(row[Column.IDS].astype(np.int64))
        all_TV = torch.log_softmax(model(ids[None]).logits[0] / temperature, -1)
        for t in np.flatnonzero(row[Column.LOSS_MASK]):
            loss = loss + 0.5 * float(row[Column.WEIGHT][t]) * (all_TV[t - 1].exp() * all_TV[t - 1]).sum()
    loss.backward()  # type: ignore[no-untyped-call]

    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert expected
    for name, gradient in expected.items():
        # The model's norms round to float32 on their way back; what comes straight out of the head is not rounded.
        tolerance = 1e-13 if name == "model.norm.weight" else 5e-6 * float(gradient.abs().max())
        torch.testing.assert_close(found[name] - without[name], gradient, rtol=0, atol=tolerance)


def test_two_ranks_add_up_to_one(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """Three simulated ranks, one of them empty, each with a plan of its own."""
    batch = make_batch()
    _, expected = run(make_trainer(), batch, [(0, 1, 2, 3)])
    totals = {name: torch.zeros_like(gradient) for name, gradient in expected.items()}
    for rows in ([3, 0], [], [1, 2]):
        planned = plan([batch.rows[row].num_tokens for row in rows], max_tokens=16)
        _, found = run(make_trainer(), batch, [tuple(rows[i] for i in part.rows) for part in planned])
        for name in totals:
            totals[name] += found[name]
    for name, gradient in expected.items():
        torch.testing.assert_close(totals[name], gradient, rtol=0, atol=1e-10)


def test_rows_without_advantage_add_exactly_nothing(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    batch = make_batch()
    silent = batch.rows[1].with_columns(advantages=np.zeros(batch.rows[1].num_tokens, np.float32))
    batch = Batch(
        step=0, rows=(batch.rows[0], silent, *batch.rows[2:]), num_sequences=4, num_loss_tokens=batch.num_loss_tokens
    )
    _, with_row = run(make_trainer(), batch, [(0, 2, 3), (1,)])
    _, without = run(make_trainer(), batch, [(0, 2, 3)])
    for name, gradient in without.items():
        assert torch.equal(with_row[name], gradient)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_first_ratio_is_exactly_one(make_trainer: MakeTrainer, make_batch: MakeBatch, compute: str) -> None:
    """With clips of width 0, any ratio but 1 is counted as clipped on one side or the other."""
    trainer = make_trainer("algorithm.clip_low=0", "algorithm.clip_high=0", compute=compute)
    batch = make_batch()
    for rows in (batch, trainer.prepare(batch)):
        microbatches = plan([row.num_tokens for row in rows.rows], max_tokens=4096)
        assert [trainer.forward_backward(rows, part).sums["clipped"] for part in microbatches] == [0.0]


def test_prepare_writes_the_present_log_probabilities(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer, batch = make_trainer("trainer.microbatch_tokens=1024"), make_batch()
    prepared = trainer.prepare(batch)
    run(trainer, prepared, [(0, 1, 2, 3)])
    trainer.optim_step()

    for row, old in zip(prepared.rows, batch.rows, strict=True):
        assert row[Column.PROXIMAL_LOGPROBS].dtype == np.float32
        assert not row[Column.PROXIMAL_LOGPROBS][~row[Column.LOSS_MASK]].any()
        assert row[Column.IDS] is old[Column.IDS]
    with_self = [row.with_columns(behaviour_logprobs=row[Column.PROXIMAL_LOGPROBS]) for row in prepared.rows]
    same = Batch(step=0, rows=tuple(with_self), num_sequences=4, num_loss_tokens=13)
    assert run(make_trainer(), same, [(0, 1, 2, 3)])[0]["abs_log_ratio"] < 1e-5
    assert run(trainer, same, [(0, 1, 2, 3)])[0]["abs_log_ratio"] > 1e-2


def test_the_canary_is_what_plain_transformers_says_of_its_tokens(make_trainer: MakeTrainer, tiny_llama: Path) -> None:
    canary = make_trainer("rollout.temperature=0.7").canary()
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    ids_BT = torch.from_numpy(canary.ids_BT.astype(np.int64))
    expected_BTV = model(ids_BT).logits[:, :-1].log_softmax(-1)  # at temperature 1, whatever is sampled at
    expected_BT = expected_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0].detach().numpy()
    np.testing.assert_allclose(canary.logprobs_BT, expected_BT, rtol=0, atol=2e-6)


def test_a_step_changes_the_weights_and_is_seen_at_once(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer, batch = make_trainer("trainer.max_grad_norm=1e-3", compute="bfloat16"), make_batch()
    first, found = run(trainer, batch, [(0, 1, 2, 3)])
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in found.values()))

    stats: StepStats = trainer.optim_step()

    assert stats.sums == pytest.approx({"grad_norm": norm, "learning_rate": 1e-2}, rel=1e-5)
    assert not any(gradient.any() for gradient in gradients(trainer).values())
    second, _ = run(trainer, batch, [(0, 1, 2, 3)])
    assert second["abs_log_ratio"] != first["abs_log_ratio"]


def test_an_infinite_gradient_names_the_step_and_applies_nothing(
    make_trainer: MakeTrainer, make_batch: MakeBatch
) -> None:
    trainer = make_trainer(compute="float32")
    before = {name: master.detach().clone() for name, master in trainer._model.masters.items()}
    batch = make_batch()
    run(trainer, batch, [(0, 1, 2, 3)])
    next(iter(trainer._model.masters.values())).grad.fill_(math.inf)  # type: ignore[union-attr]

    with pytest.raises(DataError, match=r"^step 3: the norm of the gradient is inf"):
        trainer.optim_step()
    for name, master in trainer._model.masters.items():
        assert torch.equal(master, before[name])


def with_row(batch: Batch, position: int, change: Callable[[Trajectory], Trajectory]) -> Batch:
    rows = [change(row) if index == position else row for index, row in enumerate(batch.rows)]
    return Batch(step=0, rows=tuple(rows), num_sequences=4, num_loss_tokens=batch.num_loss_tokens)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_what_is_under_the_mask_changes_no_bit(
    make_trainer: MakeTrainer, make_batch: MakeBatch, garbage: float
) -> None:
    def spoil(row: Trajectory) -> Trajectory:
        mask_T = row[Column.LOSS_MASK]
        columns = ("behaviour_logprobs", "advantages", "weight")
        return row.with_columns(**{name: np.where(mask_T, row[Column(name)], np.float32(garbage)) for name in columns})

    batch = make_batch()
    clean, clean_gradients = run(make_trainer(), batch, [(0, 1, 2, 3)])
    spoilt, found = run(make_trainer(), with_row(batch, 1, spoil), [(0, 1, 2, 3)])
    assert spoilt == clean
    for name, gradient in clean_gradients.items():
        assert torch.equal(found[name], gradient)


def test_bad_rows_are_named(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    trainer, batch = make_trainer("trainer.microbatch_tokens=1024"), make_batch()
    everything = Microbatch(rows=(0, 1, 2, 3))

    def no_number(row: Trajectory) -> Trajectory:
        return row.with_columns(behaviour_logprobs=np.full(row.num_tokens, np.nan, np.float32))

    def from_the_start(row: Trajectory) -> Trajectory:
        return row.with_columns(loss_mask=np.ones(row.num_tokens, np.bool_))

    with pytest.raises(DataError, match=r"^row row-2: the behaviour log-probability of a loss token is nan"):
        trainer.forward_backward(with_row(batch, 2, no_number), everything)
    with pytest.raises(DataError, match=r"^row row-1: its first token is a loss token"):
        trainer.forward_backward(with_row(batch, 1, from_the_start), everything)
    assert not any(gradient.any() for gradient in gradients(trainer).values())


def test_publication_and_export(
    make_trainer: MakeTrainer, make_batch: MakeBatch, tiny_llama: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(compute="bfloat16")
    # What is published first is compared with the checkpoint's weights.
    assert sum(entry.num_changed for entry in trainer.publish(0, incarnation=0).tensors) == 0
    run(trainer, make_batch(), [(0, 1, 2, 3)])
    trainer.optim_step()

    publication = trainer.publish(1, incarnation=0)
    assert sum(entry.num_changed for entry in publication.tensors) > 0
    trainer.export(str(tmp_path / "saved"))

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert [entry.name for entry in publication.tensors] == sorted(load_file(tiny_llama / "model.safetensors"))
    content = np.fromfile(publication.path, dtype=np.uint8)
    for entry in publication.tensors:
        assert entry.dtype == "bfloat16"
        assert entry.shape == tuple(saved[entry.name].shape)
        raw = torch.from_numpy(content[entry.offset : entry.offset + entry.size_bytes]).view(torch.bfloat16)
        assert torch.equal(raw.reshape(entry.shape), saved[entry.name].to(torch.bfloat16))
    trainer.close()
    trainer.close()
    assert not Path(publication.path).exists()


def test_training_on_one_reply_makes_it_likely(make_trainer: MakeTrainer, make_batch: MakeBatch) -> None:
    """Ten updates with the advantage 1 everywhere, in bf16: the replies' log-probabilities must rise."""
    trainer = make_trainer("algorithm.correction=none", compute="bfloat16")
    batch: Any = make_batch()
    rows = tuple(row.with_columns(advantages=np.ones(row.num_tokens, np.float32)) for row in batch.rows)
    batch = Batch(step=0, rows=rows, num_sequences=4, num_loss_tokens=13)
    ratios = []
    for _ in range(10):
        ratios.append(run(trainer, batch, [(0, 1, 2, 3)])[0]["log_ratio"])
        trainer.optim_step()
    assert ratios[-1] > ratios[0] + 13
