"""What both ends agree on: types of tensors, the digest of a tensor and of a version, and what a checkpoint holds.

Digests are xxh3_128: they guard against mistakes and torn writes on one machine, not against an adversary, and a fast
hash is what lets every publication be checked whole. May not touch shared memory: that is ``publish`` and ``receive``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import xxhash

from fourstroke.errors import ModelNotFoundError
from fourstroke.types import TensorEntry

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a dense tensor in bytes.

    Example:
        >>> num_bytes("bfloat16", (3, 4))
        24
    """
    return int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """uint8 [bytes]: a view of a contiguous CPU tensor of any shape."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def tensor_digest(name: str, *, dtype: str, shape: tuple[int, ...], data: np.ndarray) -> str:
    """Digest of a tensor's name, type, shape and bytes, so that equal bytes under another name differ.

    Args:
        name: The tensor's name in the checkpoint.
        dtype: Key of :data:`DTYPES`.
        shape: Its shape.
        data: uint8 [bytes], contiguous.

    Example:
        >>> tensor_digest("a", dtype="float32", shape=(0,), data=np.empty(0, np.uint8))[:8]
        '79fda8ac'
    """
    hasher = xxhash.xxh3_128(f"{name}\0{dtype}\0{shape}\0".encode())
    hasher.update(data.data)
    return hasher.hexdigest()


def version_digest(entries: Iterable[TensorEntry]) -> str:
    """Digest of a whole publication: over the entries' names and digests, in the order of the names."""
    hasher = xxhash.xxh3_128()
    for entry in sorted(entries, key=lambda entry: entry.name):
        hasher.update(f"{entry.name}\0{entry.digest}\0".encode())
    return hasher.hexdigest()


def checkpoint_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint in Hugging Face format, from the headers alone; no tensor is read.

    Args:
        model_path: Folder with ``model.safetensors``, or with shards and their index.

    Raises:
        ModelNotFoundError: The folder holds no such checkpoint, or a header is damaged.

    Example:
        >>> checkpoint_shapes(Path("smollm2"))["model.norm.weight"]  # doctest: +SKIP
        (576,)
    """
    index = model_path / _INDEX
    try:
        if index.is_file():
            files = sorted({model_path / name for name in json.loads(index.read_text())["weight_map"].values()})
        else:
            files = [model_path / _SINGLE]
        return {name: shape for file in files for name, shape in _header_shapes(file)}
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelNotFoundError(
            f"{model_path} holds no whole checkpoint in safetensors format ({type(error).__name__}: {error}); save it "
            "again"
        ) from error


def _header_shapes(file: Path) -> Iterable[tuple[str, tuple[int, ...]]]:
    """A safetensors file opens with the length of a JSON header (uint64, little endian), then the header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError(f"{file.name} says that its header has {length} bytes")
        header = json.loads(stream.read(length))
    return [(name, tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
