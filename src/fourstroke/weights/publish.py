"""The writing end: copies a trainer's tensors into one file of shared memory and says what they must be.

    tensor --convert--> source --digest--> entry
                          `-----copy-----> mapping          (a torn or missing copy shows against the digest)

The file is made and mapped once, since fresh pages of shared memory cost ten times a copy into warm ones. A publication
stays valid until the next one begins, so the caller publishes only once the last has landed. May not know of engines.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fourstroke.errors import PublicationError
from fourstroke.types import Publication, TensorEntry, WeightVersion
from fourstroke.weights.manifest import DTYPES, bytes_of, num_bytes, tensor_digest, version_digest

# Enough for any type's alignment and for whole cache lines.
_ALIGNMENT = 64
# Whole numbers of the size of an element, by its bytes: bits are compared, since NaN differs from itself.
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, published type (key of ``manifest.DTYPES``) and shape of a tensor.

    Example:
        >>> TensorSpec(name="model.norm.weight", dtype="bfloat16", shape=(576,)).shape
        (576,)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Publisher:
    """Owns one file of shared memory and writes publications into it.

    Args:
        path: The file, in a RAM-backed folder; its name must be unique on the machine, and it must not exist.
        entries: Every tensor of a publication.

    Raises:
        PublicationError: Two entries have one name, or the file cannot be made whole.

    Example:
        >>> spec = TensorSpec(name="w", dtype="float32", shape=(2,))
        >>> publisher = Publisher(Path("/dev/shm/run-1"), entries=[spec])  # doctest: +SKIP
        >>> publisher.publish(1, [("w", torch.ones(2))], incarnation=0).version.number  # doctest: +SKIP
        1
    """

    def __init__(self, path: Path, *, entries: Sequence[TensorSpec]) -> None:
        self._path = path
        self._specs = {spec.name: spec for spec in entries}
        if len(self._specs) != len(entries):
            raise PublicationError(f"{len(entries)} tensors are to be published under {len(self._specs)} names")
        self._offsets: dict[str, int] = {}
        end = 0
        for spec in entries:
            self._offsets[spec.name] = end
            end += -(-num_bytes(spec.dtype, spec.shape) // _ALIGNMENT) * _ALIGNMENT
        self._size_bytes = max(end, _ALIGNMENT)
        self._mapping: mmap.mmap | None = _allocate(path, self._size_bytes)
        self._whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._written: set[str] = set()

    def publish(self, number: int, tensors: Iterable[tuple[str, torch.Tensor]], *, incarnation: int) -> Publication:
        """Write all tensors and return the message that announces them.

        Args:
            number: Number of the version.
            tensors: Every tensor once, in any order, of any floating type, on any device.
            incarnation: Incarnation of the run, part of the version.

        Raises:
            PublicationError: A tensor is missing, unknown, there twice or misshapen, or the publisher is closed.
        """
        if self._mapping is None:
            raise PublicationError(f"publication {number} after the publisher of {self._path} was closed")
        written: dict[str, TensorEntry] = {}
        for name, tensor in tensors:
            if name in written:
                raise PublicationError(f"publication {number}: tensor {name} is given twice")
            written[name] = self._write(number, name, tensor)
        if missing := sorted(self._specs.keys() - written.keys()):
            raise PublicationError(f"publication {number}: tensor {missing[0]} is missing ({len(missing)} in all)")
        entries = tuple(written[name] for name in sorted(written))
        version = WeightVersion(incarnation=incarnation, number=number, digest=version_digest(entries))
        return Publication(version=version, path=str(self._path), size_bytes=self._size_bytes, tensors=entries)

    def close(self) -> None:
        """Unmap and unlink. May be called twice. Who has the file mapped keeps what it maps."""
        if self._mapping is not None:
            # The view goes first: a mapping that something still looks into cannot be closed.
            self._whole = torch.empty(0, dtype=torch.uint8)
            self._mapping.close()
            self._mapping = None
            self._path.unlink(missing_ok=True)

    def _write(self, number: int, name: str, tensor: torch.Tensor) -> TensorEntry:
        spec = self._specs.get(name)
        if spec is None:
            raise PublicationError(f"publication {number}: tensor {name} is unknown to the publisher")
        if tuple(tensor.shape) != spec.shape:
            raise PublicationError(
                f"publication {number}: tensor {name} has shape {tuple(tensor.shape)}, declared was {spec.shape}"
            )
        source = bytes_of(tensor.detach().to(device="cpu", dtype=DTYPES[spec.dtype]).contiguous())
        digest = tensor_digest(name, dtype=spec.dtype, shape=spec.shape, data=source)
        offset, wire = self._offsets[name], torch.from_numpy(source)
        num_changed = self._num_changed(name, source=wire)
        self._copy(offset, source=wire)
        self._written.add(name)
        return TensorEntry(
            name=name,
            dtype=spec.dtype,
            shape=spec.shape,
            offset=offset,
            size_bytes=len(source),
            digest=digest,
            num_changed=num_changed,
        )

    def _num_changed(self, name: str, *, source: torch.Tensor) -> int:
        bits = _BITS[DTYPES[self._specs[name].dtype].itemsize]
        new = source.view(bits)
        if name not in self._written:
            return len(new)
        old = self._whole[self._offsets[name] : self._offsets[name] + len(source)].view(bits)
        return int(torch.count_nonzero(old != new))

    def _copy(self, offset: int, *, source: torch.Tensor) -> None:
        self._whole[offset : offset + len(source)].copy_(source)


def _allocate(path: Path, size_bytes: int) -> mmap.mmap:
    """A new file of that size, mapped, with every page there: a full disk is found now, not as a signal in a copy."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise PublicationError(f"{path} cannot be made for weights in transit: {error.strerror}") from error
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        path.unlink()
        raise PublicationError(
            f"{path} cannot hold the {size_bytes} bytes of a publication: {error.strerror}; make room in {path.parent} "
            "or set FOURSTROKE_SHM to another folder in RAM"
        ) from error
    finally:
        os.close(descriptor)
