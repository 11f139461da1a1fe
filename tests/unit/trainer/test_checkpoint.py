"""Folders of checkpoints: what is in them, what is refused, what a kill or a full disk leaves, and which are kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fourstroke.errors import RunFolderError
from fourstroke.store.checkpoints import checkpoint_path, checkpoints, retain
from fourstroke.trainer.checkpoint import TrainerState, begin_checkpoint, read_checkpoint, write_checkpoint

SHAPES: dict[str, tuple[int, ...]] = {"embed": (7, 5), "norm": (5,), "scale": (), "frozen": (2, 3)}


def make_state(step: int = 10) -> TrainerState:
    """Every parameter has moments but ``frozen``."""
    generator = torch.Generator().manual_seed(step)
    trained = [name for name in SHAPES if name != "frozen"]
    shapes = {**SHAPES, **{f"{kind}.{name}": SHAPES[name] for name in trained for kind in ("exp_avg", "exp_avg_sq")}}
    return TrainerState(
        step=step,
        num_updates=3 * step,
        adam_steps=dict.fromkeys(trained, 3 * step),
        tensors={name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
    )


def write(parent: Path, step: int = 10) -> Path:
    folder = checkpoint_path(parent, step=step)
    write_checkpoint(folder, make_state(step), partial=begin_checkpoint(folder))
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is written ------------------------------------------------------------------------------------------------


def test_another_reader_finds_the_tensors(tmp_path: Path) -> None:
    folder, expected = write(tmp_path / "run" / "checkpoints"), make_state().tensors

    found = load_file(folder / "trainer.safetensors")

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    manifest = json.loads((folder / "trainer.json").read_text())
    assert {key: manifest[key] for key in ("schema", "step", "num_updates")} == {
        "schema": 1,
        "step": 10,
        "num_updates": 30,
    }
    assert manifest["adam_steps"] == {"embed": 30, "norm": 30, "scale": 30}
    assert manifest["tensors"]["exp_avg.embed"]["shape"] == [7, 5]
    assert manifest["versions"].keys() == {"fourstroke", "python", "torch", "transformers", "safetensors"}
    assert manifest["versions"]["torch"] == torch.__version__
    assert names_in(folder) == ["trainer.json", "trainer.safetensors"]
    assert names_in(folder.parent) == ["step-000010"]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    state = read_checkpoint(write(tmp_path), shapes=SHAPES)

    expected = make_state()
    assert (state.step, state.num_updates, state.adam_steps) == (10, 30, expected.adam_steps)
    assert state.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_a_tensor_with_gaps_is_written_as_its_values(tmp_path: Path) -> None:
    folder, square = tmp_path / "step-000001", torch.arange(12.0).reshape(3, 4).T
    state = TrainerState(step=1, num_updates=1, adam_steps={}, tensors={"w": square, "none": torch.empty(0, 3)})

    write_checkpoint(folder, state, partial=begin_checkpoint(folder))

    found = read_checkpoint(folder, shapes={"w": (4, 3), "none": (0, 3)})
    assert torch.equal(found.tensors["w"], square)


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with pytest.raises(RunFolderError, match=r"step-000010 exists and a checkpoint is never written over; remove it"):
        begin_checkpoint(folder)
    assert read_checkpoint(folder, shapes=SHAPES).step == 10


# --- what is refused ------------------------------------------------------------------------------------------------


def flip_a_byte(folder: Path) -> None:
    """Of the last tensor in the file."""
    with (folder / "trainer.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def with_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "trainer.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "trainer.safetensors")

    return apply


def with_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / "trainer.json").read_text())
        change(manifest)
        (folder / "trainer.json").write_text(json.dumps(manifest))

    return apply


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, 100)


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (flip_a_byte, "is damaged: the bytes of the tensor 'exp_avg_sq.scale' are not"),
    (with_tensors(lambda held: held["norm"].add_(1)), "is damaged: the bytes of the tensor 'norm' are not"),
    (with_tensors(lambda held: held.pop("exp_avg.norm")), r"lacks the tensor 'exp_avg.norm' \(1 in all\)"),
    (with_manifest(lambda held: held["tensors"].pop("embed")), "lacks the tensor 'embed'"),
    (
        with_tensors(lambda held: held.update(embed=held["embed"].T.contiguous())),
        r"holds the tensor 'embed' as torch.float32 \(5, 7\) and the model has it as torch.float32 \(7, 5\)",
    ),
    (
        with_tensors(lambda held: held.update(norm=held["norm"].bfloat16())),
        r"holds the tensor 'norm' as torch.bfloat16 \(5,\)",
    ),
    (with_tensors(lambda held: held.update(bias=torch.ones(1))), "holds 'bias', which the model does not have"),
    (
        with_manifest(lambda held: held["tensors"].update(bias=held["tensors"]["norm"])),
        "holds 'bias', which the model does not have",
    ),
    (with_manifest(lambda held: held["adam_steps"].update(bias=1)), "holds 'bias', which the model does not have"),
    (with_manifest(lambda held: held["adam_steps"].pop("norm")), "holds 'exp_avg.norm', which the model does not have"),
    (with_manifest(lambda held: held["adam_steps"].update(frozen=1)), "lacks the tensor 'exp_avg.frozen'"),
    (with_manifest(lambda held: held.update(schema=2)), "has checkpoint schema 2 and Fourstroke .* reads up to 1"),
    (with_manifest(lambda held: held.pop("num_updates")), "is damaged: trainer.json does not read"),
    (cut("trainer.json"), "is damaged: trainer.json does not read"),
    (cut("trainer.safetensors"), "is damaged: trainer.safetensors does not read"),
    (lambda folder: (folder / "trainer.safetensors").unlink(), "is damaged: trainer.safetensors does not read"),
    (lambda folder: (folder / "trainer.json").unlink(), "is no whole checkpoint, since it has no trainer.json"),
]


@pytest.mark.parametrize(("spoil", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_a_spoilt_checkpoint_is_refused_by_name(tmp_path: Path, spoil: Callable[[Path], None], sentence: str) -> None:
    folder = write(tmp_path)
    spoil(folder)
    with pytest.raises(RunFolderError, match=sentence):
        read_checkpoint(folder, shapes=SHAPES)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="lacks the tensor 'head'"):
        read_checkpoint(write(tmp_path), shapes={**SHAPES, "head": (7, 5)})


# --- a kill, a full disk --------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from pathlib import Path
import torch
from fourstroke.store.checkpoints import checkpoint_path
from fourstroke.trainer.checkpoint import TrainerState, begin_checkpoint, write_checkpoint

def write(step):
    state = TrainerState(step=step, num_updates=step, adam_steps={}, tensors={f"w{i}": torch.ones(9) for i in range(4)})
    folder = checkpoint_path(Path(sys.argv[1]), step=step)
    write_checkpoint(folder, state, partial=begin_checkpoint(folder))

write(1)
name, left = sys.argv[2], int(sys.argv[3])
real = getattr(os, name)

def kill_at_last(*arguments, **keywords):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **keywords)

setattr(os, name, kill_at_last)
write(2)
"""


@pytest.mark.parametrize(
    ("function", "call", "expected"),
    [
        ("write", 3, [1]),  # among the tensors
        ("fsync", 1, [1]),  # tensors written, not on disk
        ("replace", 1, [1]),  # trainer.json written, without its name
        ("rename", 1, [1]),  # all written, the folder without its name
        ("fsync", 4, [1, 2]),  # the folder has its name
    ],
)
def test_a_kill_leaves_whole_checkpoints_only(tmp_path: Path, function: str, call: int, expected: list[int]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), function, str(call)],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        check=False,
    )

    assert done.returncode == -signal.SIGKILL
    assert checkpoints(tmp_path) == expected
    for step in expected:
        found = read_checkpoint(checkpoint_path(tmp_path, step=step), shapes={f"w{i}": (9,) for i in range(4)})
        assert found.step == step
    assert (tmp_path / ".step-000002.partial").exists() == (expected == [1])
    write(tmp_path, step=3)
    assert names_in(tmp_path) == [*(f"step-{step:06d}" for step in expected), "step-000003"]


@pytest.mark.parametrize("num_writes", [0, 1, 5, 10])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    write(tmp_path, step=1)
    partial, left, real_write = begin_checkpoint(tmp_path / "step-000002"), num_writes, os.write

    def fill_up(descriptor: int, data: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(RunFolderError, match=r"step-000002 cannot be written, since its disk is full; free some space"):
        write_checkpoint(tmp_path / "step-000002", make_state(2), partial=partial)

    assert names_in(tmp_path) == ["step-000001"]


def test_a_disk_that_is_full_at_the_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise RunFolderError(f"{path.name} of {len(data)} bytes does not fit")

    monkeypatch.setattr("fourstroke.trainer.checkpoint.write_atomic", fail)
    with pytest.raises(RunFolderError, match=r"^trainer\.json of"):
        write(tmp_path)
    assert names_in(tmp_path) == []


# --- which are kept -------------------------------------------------------------------------------------------------


def pretend(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "trainer.json").write_text("{}")


def test_only_whole_checkpoints_are_listed(tmp_path: Path) -> None:
    pretend(tmp_path, "step-000010", "step-000009", "step-1000000", ".step-000011.partial", ".step-000001.removed")
    pretend(tmp_path, "step-12", "step-000013-old", "best")
    (tmp_path / "step-000014").mkdir()  # an exported model, say
    assert checkpoints(tmp_path) == [9, 10, 1000000]


@settings(deadline=None, max_examples=30)
@example(steps={3, 4}, keep=1)  # step 3 was deleted in part once, and trained again
@given(steps=st.sets(st.integers(0, 2_000_000), max_size=8), keep=st.integers(1, 4))
def test_the_newest_are_kept(tmp_path_factory: pytest.TempPathFactory, steps: set[int], keep: int) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    pretend(folder, *(checkpoint_path(folder, step=step).name for step in steps), ".step-000003.removed")

    retain(folder, keep=keep)

    assert checkpoints(folder) == sorted(steps)[-keep:]
    assert len(names_in(folder)) == min(len(steps), keep)
    shutil.rmtree(folder)


def test_a_deletion_cut_short_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step=step)

    def stop(path: Path) -> None:
        (path / "trainer.safetensors").unlink()
        raise InterruptedError

    monkeypatch.setattr(shutil, "rmtree", stop)
    with pytest.raises(InterruptedError):
        retain(tmp_path, keep=2)
    assert checkpoints(tmp_path) == [2, 3]

    monkeypatch.undo()
    retain(tmp_path, keep=2)
    assert names_in(tmp_path) == ["step-000002", "step-000003"]


def test_a_write_does_not_touch_what_is_being_removed(tmp_path: Path) -> None:
    """Removal and the next write may go on at once, in two processes."""
    pretend(tmp_path, ".step-000001.removed", ".step-000002.partial")
    write(tmp_path, step=3)
    assert names_in(tmp_path) == [".step-000001.removed", "step-000003"]
