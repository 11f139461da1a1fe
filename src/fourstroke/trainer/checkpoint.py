"""A trainer's checkpoint: all that decides its next step, in one folder, whole or not at all.

    step-000010/
      trainer.safetensors   fp32 masters by name; ``exp_avg.<name>`` and ``exp_avg_sq.<name>``, Adam's moments
      trainer.json          schema, counters, shape and digest of each tensor, versions of libraries

    begin       .step-000010.partial/ is made; what a killed run left of that kind is removed
    write       trainer.safetensors, fsync -> trainer.json, fsync -> rename to step-000010/, fsync of the parent
    read        names, shapes and digests against the model and trainer.json -> views of the file, for copying

Invariants: a folder with ``trainer.json`` under its own name is whole and on disk; a tensor is written from where it
lies, one pass for digest and disk. Training draws no random numbers (dropout is off), so no generator's state is kept.
Gradients are not kept: a checkpoint is of the time between two steps.
May not know of runs, ledgers or threads.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import fourstroke
from fourstroke.errors import RunFolderError
from fourstroke.store.checkpoints import CHECKPOINT_MANIFEST
from fourstroke.store.files import sync_folder, write_all, write_atomic, writing
from fourstroke.weights.manifest import bytes_of, tensor_digest

CHECKPOINT_SCHEMA = 1
# Adam's moments, as torch names them and as they stand before a parameter's name.
MOMENTS = ("exp_avg", "exp_avg_sq")

_TENSORS = "trainer.safetensors"
_DISTRIBUTIONS = ("torch", "transformers", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a checkpoint holds. The tensors are not copies: they are the trainer's own, or views of a file.

    Attributes:
        step: Steps that are contained.
        num_updates: Optimiser updates that are contained; the learning rate goes on from it.
        adam_steps: Adam's count for each parameter that has moments; one that never had a gradient has none.
        tensors: fp32, by name: each master, and for each name in ``adam_steps`` its moments, prefixed by
            :data:`MOMENTS`.

    Example:
        >>> TrainerState(step=3, num_updates=3, adam_steps={}, tensors={"w": torch.ones(2)}).num_updates
        3
    """

    step: int
    num_updates: int
    adam_steps: Mapping[str, int]
    tensors: Mapping[str, Tensor]


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    shape: tuple[int, ...]
    digest: str


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    step: int
    num_updates: int
    adam_steps: dict[str, int]
    tensors: dict[str, _Entry]
    versions: dict[str, str]


class _SchemaOnly(msgspec.Struct):
    """The part that every schema, past or to come, has."""

    schema: int


# --- writing --------------------------------------------------------------------------------------------------------


def begin_checkpoint(folder: Path) -> Path:
    """Make the hidden sibling that ``folder`` is written in, and remove those that killed runs left beside it.

    Raises:
        RunFolderError: ``folder`` exists, or its parent may not be written.
    """
    if folder.exists():
        raise RunFolderError(
            f"{folder} exists and a checkpoint is never written over; remove it or name another folder"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    with writing(folder):
        for leftover in (partial, *folder.parent.glob(".step-*.partial")):
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    return partial


def write_checkpoint(folder: Path, state: TrainerState, *, partial: Path) -> None:
    """Write ``state`` into ``partial`` and give it the name ``folder``. On return it is whole and on disk.

    Tensors are read in place, so nothing may change them before this returns; from a GPU they come one at a time. After
    a failure nothing is left, so that a full disk has its space back.

    Raises:
        RunFolderError: The disk is full, or the place may not be written.
    """
    with writing(folder):
        try:
            manifest = _Manifest(
                schema=CHECKPOINT_SCHEMA,
                step=state.step,
                num_updates=state.num_updates,
                adam_steps=dict(state.adam_steps),
                tensors=_write_tensors(partial / _TENSORS, state.tensors),
                versions=_versions(),
            )
            write_atomic(partial / CHECKPOINT_MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
            partial.rename(folder)
            sync_folder(folder.parent)
        except (OSError, RunFolderError):
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, _Entry]:
    """A safetensors file (uint64 length of the header, JSON header, data) in one pass over the tensors, and digests.

    The library's own writer would need a second pass for the digests, and reports a full disk as a text.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32, (name, tensor.dtype)
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    entries = {}
    with path.open("wb", buffering=0) as file:
        write_all(file.fileno(), struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            cpu = tensor.detach().cpu().contiguous()
            entries[name] = _Entry(shape=tuple(cpu.shape), digest=_digest(name, cpu))
            write_all(file.fileno(), bytes_of(cpu).data)
        os.fsync(file.fileno())
    return entries


def _digest(name: str, tensor: Tensor) -> str:
    return tensor_digest(name, dtype="float32", shape=tuple(tensor.shape), data=bytes_of(tensor))


def _versions() -> dict[str, str]:
    """For whoever wonders why a resumed run differs; nothing is refused for them."""
    installed = {name: metadata.version(name) for name in _DISTRIBUTIONS}
    return {"fourstroke": fourstroke.__version__, "python": platform.python_version(), **installed}


# --- reading --------------------------------------------------------------------------------------------------------


def read_checkpoint(folder: Path, *, shapes: Mapping[str, tuple[int, ...]]) -> TrainerState:
    """A whole checkpoint of a model, every byte of it verified.

    Args:
        folder: The checkpoint.
        shapes: Shape of each master of the model, by name.

    Returns:
        The state; its tensors are views of the file, at any alignment, so they are to be copied and not computed with.

    Raises:
        RunFolderError: It is no checkpoint, has a newer schema, is damaged, or is of another model; names the tensor.
    """
    manifest = _read_manifest(folder)
    stray = sorted(manifest.adam_steps.keys() - shapes.keys())
    expected = dict(shapes)
    for name in manifest.adam_steps.keys() & shapes.keys():
        expected |= {f"{kind}.{name}": shapes[name] for kind in MOMENTS}
    tensors = _map_tensors(folder)
    for held in (manifest.tensors, tensors):
        if missing := sorted(expected.keys() - held.keys()):
            raise _refused(folder, f"lacks the tensor {missing[0]!r} ({len(missing)} in all)")
        stray += sorted(held.keys() - expected.keys())
    if stray:
        raise _refused(folder, f"holds {stray[0]!r}, which the model does not have")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name] or tensor.dtype != torch.float32:
            raise _refused(
                folder,
                f"holds the tensor {name!r} as {tensor.dtype} {tuple(tensor.shape)} and the model has it as "
                f"torch.float32 {expected[name]}",
            )
    for name, tensor in tensors.items():
        if _digest(name, tensor) != manifest.tensors[name].digest:
            raise _refused(folder, f"is damaged: the bytes of the tensor {name!r} are not those that were written")
    return TrainerState(
        step=manifest.step, num_updates=manifest.num_updates, adam_steps=manifest.adam_steps, tensors=tensors
    )


def _read_manifest(folder: Path) -> _Manifest:
    file = folder / CHECKPOINT_MANIFEST
    if not file.is_file():
        raise RunFolderError(
            f"{folder} is no whole checkpoint, since it has no {CHECKPOINT_MANIFEST}; name another one"
        )
    data = file.read_bytes()
    try:
        schema = msgspec.json.decode(data, type=_SchemaOnly).schema
        if schema > CHECKPOINT_SCHEMA:
            raise RunFolderError(
                f"{folder} has checkpoint schema {schema} and Fourstroke {fourstroke.__version__} reads up to "
                f"{CHECKPOINT_SCHEMA}; use a newer Fourstroke"
            )
        return msgspec.json.decode(data, type=_Manifest)
    except msgspec.MsgspecError as error:
        raise _refused(folder, f"is damaged: {CHECKPOINT_MANIFEST} does not read ({error})") from error


def _map_tensors(folder: Path) -> dict[str, Tensor]:
    """Views of the file's tensors; no byte is read before it is looked at."""
    try:
        with safe_open(folder / _TENSORS, framework="pt") as file:
            names: Iterable[str] = file.keys()
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise _refused(folder, f"is damaged: {_TENSORS} does not read ({error})") from error


def _refused(folder: Path, why: str) -> RunFolderError:
    return RunFolderError(f"{folder} {why}; remove it to resume from an earlier checkpoint")
