"""A trainer that is saved and loaded goes on bit for bit, also in a new process; and what overlaps with the writing.

Run as a program, this file is that new process: it loads a checkpoint and trains on, see ``main``.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from fourstroke.algorithms.losses import bind_loss
from fourstroke.config import RunConfig, load_config
from fourstroke.errors import RunFolderError
from fourstroke.store.checkpoints import checkpoints
from fourstroke.trainer import engine
from fourstroke.trainer.checkpoint import TrainerState
from fourstroke.trainer.engine import TorchTrainer
from fourstroke.types import Batch, Microbatch, decode, encode

MakeTrainer = Callable[..., TorchTrainer]
MakeBatch = Callable[..., Batch]

SHAPES = ((40, 24), (30, 9), (5, 60), (41, 24), (12, 3))
CUT = ((0, 3), (1, 2, 4))


def new_trainer(config: RunConfig, *, model: Path, publication: Path) -> TorchTrainer:
    trainer = TorchTrainer(config, model_path=model, publication_path=publication, loss=bind_loss(config.algorithm))
    trainer.start()
    return trainer


def train(trainer: TorchTrainer, batches: Sequence[Batch]) -> list[list[str]]:
    """For each step all that it returned and published, to the bit."""
    steps = []
    for batch in batches:
        prepared = trainer.prepare(batch)
        stats = [trainer.forward_backward(prepared, Microbatch(rows=rows)) for rows in CUT]
        stats.append(trainer.optim_step())
        publication = trainer.publish(batch.step, incarnation=0)
        published = xxhash.xxh3_128_hexdigest(Path(publication.path).read_bytes())
        steps.append([*(encode(each).hex() for each in stats), publication.version.digest, published])
    return steps


def digests(trainer: TorchTrainer) -> dict[str, str]:
    """Masters, moments and counters, to the bit."""
    state = trainer._optimiser.state(step=0)
    found = {
        name: xxhash.xxh3_128_hexdigest(tensor.detach().numpy().tobytes()) for name, tensor in state.tensors.items()
    }
    return {**found, "counters": json.dumps([state.num_updates, dict(state.adam_steps)])}


def main(folder: Path, model: Path, num_done: int) -> None:
    """Load ``folder/step-*``, train on the batches after it, and write ``outcome.json``."""
    trainer = new_trainer(
        RunConfig.model_validate_json((folder / "config.json").read_bytes()),
        model=model,
        publication=folder / "weights-resumed",
    )
    step = trainer.load(str(folder / "checkpoints" / f"step-{num_done:06d}"))
    republished = trainer.publish(step, incarnation=0).version.digest
    batches = [decode(path.read_bytes(), Batch) for path in sorted(folder.glob("batch-*"))]
    steps = train(trainer, batches[step:])
    outcome = {"step": step, "republished": republished, "steps": steps, "state": digests(trainer)}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    trainer.close()


@pytest.fixture
def make_config() -> Iterator[Callable[..., RunConfig]]:
    """Deterministic configurations; what they set for the process is set back."""
    num_threads = torch.get_num_threads()

    def make(**trainer: Any) -> RunConfig:
        settings = {"learning_rate": 1e-2, "schedule": "linear", "warmup_steps": 2, "num_threads": 1, **trainer}
        return load_config({"deterministic": True, "num_steps": 5, "trainer": settings})

    yield make
    torch.use_deterministic_algorithms(mode=False)
    torch.set_num_threads(num_threads)


@pytest.fixture
def make_trainer(make_config: Callable[..., RunConfig], tiny_llama: Path, tmp_path: Path) -> Iterator[MakeTrainer]:
    """Trainers of the tiny model, closed at the end."""
    made: list[TorchTrainer] = []

    def make(**trainer: Any) -> TorchTrainer:
        publication = tmp_path / f"weights-{len(made)}"
        made.append(new_trainer(make_config(**trainer), model=tiny_llama, publication=publication))
        return made[-1]

    yield make
    for each in made:
        each.close()


def batches_of(make_batch: MakeBatch, count: int) -> list[Batch]:
    made = [make_batch(seed, shapes=SHAPES) for seed in range(count)]
    return [
        Batch(step=step, rows=batch.rows, num_sequences=batch.num_sequences, num_loss_tokens=batch.num_loss_tokens)
        for step, batch in enumerate(made, start=1)
    ]


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_new_process_goes_on_bit_for_bit(
    make_trainer: MakeTrainer, make_batch: MakeBatch, tiny_llama: Path, tmp_path: Path, compute_dtype: str
) -> None:
    batches = batches_of(make_batch, 5)
    whole, first = (make_trainer(compute_dtype=compute_dtype, num_threads=2) for _ in range(2))
    random_state = torch.get_rng_state()
    expected = train(whole, batches)
    assert train(first, batches[:3]) == expected[:3]
    first.save(str(tmp_path / "checkpoints" / "step-000003"), step=3)
    first.flush()
    assert torch.equal(torch.get_rng_state(), random_state), "something draws: its state belongs into a checkpoint"
    (tmp_path / "config.json").write_text(first._config.model_dump_json())
    for batch in batches:
        (tmp_path / f"batch-{batch.step}").write_bytes(encode(batch))

    subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(tiny_llama), "3"],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )

    resumed = json.loads((tmp_path / "outcome.json").read_text())
    assert resumed["step"] == 3
    assert resumed["republished"] == expected[2][-2]
    assert resumed["steps"] == expected[3:]
    assert resumed["state"] == digests(whole)
    assert len({step[-1] for step in expected}) == 5


def test_a_checkpoint_before_the_first_step(make_trainer: MakeTrainer, make_batch: MakeBatch, tmp_path: Path) -> None:
    """There are no moments yet; those of the trainer that loads it must not stay."""
    batches = batches_of(make_batch, 2)
    fresh, other = make_trainer(), make_trainer()
    fresh.save(str(tmp_path / "step-000000"), step=0)
    fresh.flush()
    train(other, batches[1:])

    assert other.load(str(tmp_path / "step-000000")) == 0

    assert train(other, batches) == train(fresh, batches)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_tensors_stay_where_torch_allocated_them(
    make_trainer: MakeTrainer, make_batch: MakeBatch, tmp_path: Path, compute_dtype: str
) -> None:
    """Kernels may give other bits at another alignment, and the optimiser holds the objects that it was made with."""
    trainer = make_trainer(compute_dtype=compute_dtype)
    train(trainer, batches_of(make_batch, 1))
    before = {name: tensor.data_ptr() for name, tensor in trainer._optimiser.state(step=1).tensors.items()}
    trainer.save(str(tmp_path / "step-000001"), step=1)

    trainer.load(str(tmp_path / "step-000001"))
    fresh = make_trainer(compute_dtype=compute_dtype)
    fresh.load(str(tmp_path / "step-000001"))

    assert {name: tensor.data_ptr() for name, tensor in trainer._optimiser.state(step=1).tensors.items()} == before
    for name, tensor in fresh._optimiser.state(step=1).tensors.items():
        assert tensor.data_ptr() % 64 == 0, name


def test_a_load_clears_a_pending_gradient(make_trainer: MakeTrainer, make_batch: MakeBatch, tmp_path: Path) -> None:
    batches = batches_of(make_batch, 2)
    trainer, other = make_trainer(), make_trainer()
    train(trainer, batches[:1])
    trainer.save(str(tmp_path / "step-000001"), step=1)
    trainer.flush()
    other.forward_backward(batches[1], Microbatch(rows=(0, 1)))

    other.load(str(tmp_path / "step-000001"))

    assert train(other, batches[1:]) == train(trainer, batches[1:])


def test_a_refused_checkpoint_changes_nothing(make_trainer: MakeTrainer, make_batch: MakeBatch, tmp_path: Path) -> None:
    trainer = make_trainer()
    train(trainer, batches_of(make_batch, 1))
    trainer.save(str(tmp_path / "step-000001"), step=1)
    trainer.flush()
    train(trainer, batches_of(make_batch, 2)[1:])
    before = digests(trainer)
    with (tmp_path / "step-000001" / "trainer.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")

    with pytest.raises(RunFolderError, match="is damaged: the bytes of the tensor"):
        trainer.load(str(tmp_path / "step-000001"))

    assert digests(trainer) == before


def test_a_save_in_mid_step_is_a_programmers_mistake(
    make_trainer: MakeTrainer, make_batch: MakeBatch, tmp_path: Path
) -> None:
    trainer = make_trainer()
    trainer.forward_backward(make_batch(), Microbatch(rows=(0,)))
    with pytest.raises(AssertionError, match="save of step 1 while a gradient is pending"):
        trainer.save(str(tmp_path / "step-000001"), step=1)
    trainer.optim_step()
    trainer.save(str(tmp_path / "step-000001"), step=1)
    trainer.flush()
    assert checkpoints(tmp_path) == [1]


# --- what overlaps --------------------------------------------------------------------------------------------------


class HeldWriter:
    """Stands before the real writer: begins to write only when told to, and keeps a log of what happened when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.begun, self.may_write = threading.Event(), threading.Event()
        self._real_write, self._real_wait = engine.write_checkpoint, futures.wait
        monkeypatch.setattr(engine, "write_checkpoint", self._write)
        monkeypatch.setattr(engine, "wait", self._wait)

    def _write(self, folder: Path, state: TrainerState, *, partial: Path) -> None:
        self.begun.set()
        assert self.may_write.wait(timeout=60), "nobody waited for the writer"
        self._real_write(folder, state, partial=partial)
        self.log.append("written")

    def _wait(self, writing: list[futures.Future[None]]) -> None:
        self.log.append("waits")
        self.may_write.set()
        self._real_wait(writing)


@pytest.mark.parametrize("verb", ["optim_step", "load", "save", "flush", "close"])
def test_who_would_change_the_tensors_waits_and_who_reads_them_does_not(
    make_trainer: MakeTrainer, make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    batch, trainer = make_batch(shapes=SHAPES), make_trainer()
    trainer.save(str(tmp_path / "step-000000"), step=0)
    trainer.flush()
    train(trainer, [batch])
    before = digests(trainer)
    held = HeldWriter(monkeypatch)
    trainer.save(str(tmp_path / "step-000001"), step=1)
    assert held.begun.wait(timeout=60)

    trainer.publish(2, incarnation=0)
    trainer.prepare(batch)
    if verb in ("optim_step", "load"):
        trainer.forward_backward(batch, Microbatch(rows=(0, 1)))
    trainer.export(str(tmp_path / "exported"))
    assert held.log == []
    assert digests(trainer) == before
    if verb == "close":
        held.may_write.set()
    arguments: dict[str, dict[str, Any]] = {
        "load": {"folder": str(tmp_path / "step-000000")},
        "save": {"folder": str(tmp_path / "step-000002"), "step": 2},
    }
    getattr(trainer, verb)(**arguments.get(verb, {}))

    assert held.log[: held.log.index("written") + 1] == (["written"] if verb == "close" else ["waits", "written"])
    assert trainer._writing is None or trainer._writing.done() or verb == "save"
    trainer.flush()
    if verb in ("optim_step", "load"):
        assert digests(trainer) != before
    saved = make_trainer()
    assert saved.load(str(tmp_path / "step-000001")) == 1
    assert digests(saved) == before


def test_a_full_disk_is_told_by_flush_and_training_goes_on(
    make_trainer: MakeTrainer, make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, batches = make_trainer(), batches_of(make_batch, 2)
    train(trainer, batches[:1])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fourstroke.trainer.checkpoint.write_all", full)
    trainer.save(str(tmp_path / "checkpoints" / "step-000001"), step=1)
    train(trainer, batches[1:])
    with pytest.raises(RunFolderError, match=r"step-000001 cannot be written, since its disk is full; free some space"):
        trainer.flush()
    trainer.flush()
    trainer.save(str(tmp_path / "checkpoints" / "step-000002"), step=2)
    with pytest.raises(RunFolderError, match="step-000002 cannot be written"):
        trainer.save(str(tmp_path / "checkpoints" / "step-000003"), step=3)
    assert list((tmp_path / "checkpoints").iterdir()) == []

    monkeypatch.undo()
    trainer.save(str(tmp_path / "checkpoints" / "step-000002"), step=2)
    trainer.flush()
    assert checkpoints(tmp_path / "checkpoints") == [2]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
