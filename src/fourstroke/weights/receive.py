"""The reading end: proves that a publication arrived whole, then hands its tensors over.

    order of versions -> names -> types, shapes, places -> size of the file -> digest of each tensor -> of the version
                                    all of it, then: tensor, tensor, tensor ...

Nothing is handed over before everything is proved, so an engine never holds half of a publication that was refused. May
not know of trainers, nor change a byte of what it reads: the mapping is private to this process.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from fourstroke.errors import PublicationError
from fourstroke.types import Publication, TensorEntry, WeightVersion
from fourstroke.weights.manifest import DTYPES, bytes_of, num_bytes, tensor_digest, version_digest


class Receiver:
    """Verifies publications against what the receiver's own checkpoint holds.

    Args:
        expected: Name and shape of every tensor, from the receiver's side (``manifest.checkpoint_shapes``).
        dtype: Type that every tensor must have, key of ``manifest.DTYPES``.

    Example:
        >>> receiver = Receiver(checkpoint_shapes(model_path), dtype="bfloat16")  # doctest: +SKIP
        >>> for name, tensor in receiver.receive(publication, held=held):  # doctest: +SKIP
        ...     load(name, tensor)
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], *, dtype: str) -> None:
        self._expected = dict(expected)
        self._dtype = dtype
        self._mapped: tuple[str, int, int] | None = None
        self._whole = torch.empty(0, dtype=torch.uint8)

    def receive(self, publication: Publication, *, held: WeightVersion) -> Iterator[tuple[str, torch.Tensor]]:
        """Verify all, then return the tensors by name.

        The tensors are views of shared memory: the next publication changes them, so whoever keeps one copies it.

        Args:
            publication: The trainer's message.
            held: The version that the receiver holds now.

        Raises:
            PublicationError: Something differs from what it must be; the sentence names the tensor and what differs.
        """
        number = publication.version.number
        _check_order(publication.version, held=held)
        self._check_manifest(publication)
        self._map(publication)
        tensors = {entry.name: self._view(entry) for entry in publication.tensors}
        for entry in publication.tensors:
            data = bytes_of(tensors[entry.name])
            found = tensor_digest(entry.name, dtype=entry.dtype, shape=entry.shape, data=data)
            if found != entry.digest:
                raise PublicationError(
                    f"publication {number}: tensor {entry.name} arrived with digest {found}, it was published with "
                    f"{entry.digest}"
                )
        return iter(tensors.items())

    def _check_manifest(self, publication: Publication) -> None:
        number = publication.version.number
        names = [entry.name for entry in publication.tensors]
        problems = [
            *(f"tensor {name} is missing" for name in sorted(self._expected.keys() - set(names))),
            *(f"tensor {name} is none of this model's" for name in sorted(set(names) - self._expected.keys())),
            *(f"tensor {name} is there twice" for name, count in sorted(Counter(names).items()) if count > 1),
            *(problem for entry in publication.tensors for problem in self._entry_problems(entry, publication)),
        ]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise PublicationError(f"publication {number}: {problems[0]}{more}")
        if (found := version_digest(publication.tensors)) != publication.version.digest:
            raise PublicationError(
                f"publication {number}: its manifest has digest {found}, its version says {publication.version.digest}"
            )

    def _entry_problems(self, entry: TensorEntry, publication: Publication) -> Iterator[str]:
        expected = self._expected.get(entry.name)
        if expected is None:
            return
        if entry.shape != expected:
            yield f"tensor {entry.name} has shape {entry.shape}, this model has {expected}"
        elif entry.dtype != self._dtype:
            yield f"tensor {entry.name} has type {entry.dtype}, this engine takes {self._dtype}"
        elif entry.size_bytes != (size := num_bytes(entry.dtype, entry.shape)):
            yield f"tensor {entry.name} has {entry.size_bytes} bytes, its shape and type make {size}"
        elif not 0 <= entry.offset <= publication.size_bytes - size or entry.offset % DTYPES[entry.dtype].itemsize:
            yield f"tensor {entry.name} cannot lie at byte {entry.offset} of {publication.size_bytes}"

    def _map(self, publication: Publication) -> None:
        """Map the file, unless that very file is mapped already: warm pages make the next publication cheap."""
        path, number = Path(publication.path), publication.version.number
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                # Reading past the end of a short file would be a signal, not an error.
                if status.st_size < publication.size_bytes:
                    raise PublicationError(
                        f"publication {number}: {path} has {status.st_size} of its {publication.size_bytes} bytes"
                    )
                identity = (publication.path, status.st_ino, publication.size_bytes)
                if identity != self._mapped:
                    mapping = mmap.mmap(file.fileno(), publication.size_bytes, access=mmap.ACCESS_COPY)
                    self._whole = torch.frombuffer(mapping, dtype=torch.uint8)
                    self._mapped = identity
        except OSError as error:
            raise PublicationError(f"publication {number}: {path} cannot be read: {error.strerror}") from error

    def _view(self, entry: TensorEntry) -> torch.Tensor:
        data = self._whole[entry.offset : entry.offset + entry.size_bytes]
        return data.view(DTYPES[entry.dtype]).view(entry.shape)


def _check_order(version: WeightVersion, *, held: WeightVersion) -> None:
    """A version follows the one held; a newer incarnation may begin at any number, an older one is dead."""
    if version.incarnation < held.incarnation:
        raise PublicationError(
            f"publication {version.number} is of incarnation {version.incarnation}, the engine holds {held}, of a "
            "newer one"
        )
    if version.incarnation == held.incarnation and version.number != held.number + 1:
        raise PublicationError(
            f"publication {version.number} does not follow version {held.number}, which the engine holds; "
            f"expected was {held.number + 1}"
        )
