"""Payload: nouns as bytes in append-only segments, found again by a reference that proves them.

    payload/segment-00000.bin   [noun][noun][noun]...   up to 64 MiB, then segment-00001.bin

A writer never touches a segment that another writer made: what a killed run left stays as it was, and the workers of a
run write side by side, each into its own. Bytes reach the system before ``append`` returns (they outlive the process,
not a power cut; the digest shows what a power cut took). Write the payload first and its reference to the ledger after
it: then every reference there can be read.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TypeVar

import xxhash

from fourstroke.errors import RunFolderError
from fourstroke.store.files import write_all, writing
from fourstroke.types import PayloadReference, decode, encode
from fourstroke.types.nouns import Noun

SEGMENT_BYTES = 64 * 2**20

NounT = TypeVar("NounT", bound=Noun)


def segment_path(folder: Path, segment: int) -> Path:
    """File of a segment.

    Example:
        >>> segment_path(Path("payload"), 3).name
        'segment-00003.bin'
    """
    return folder / f"segment-{segment:05d}.bin"


class PayloadWriter:
    """Appends nouns to new segments of a payload folder, beside other writers of the same run.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from fourstroke.types import VersionRun
        >>> with TemporaryDirectory() as folder:
        ...     writer = PayloadWriter(Path(folder))
        ...     reference = writer.append(VersionRun(version=3, num_tokens=4))
        ...     writer.close()
        ...     read_payload(Path(folder), reference, VersionRun).version
        3
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._open(1 + max((int(path.stem[8:]) for path in folder.glob("segment-*.bin")), default=-1))

    def append(self, noun: Noun) -> PayloadReference:
        """Write a noun; a segment that would pass its size is closed first and the next one begun.

        Raises:
            RunFolderError: The disk is full.
        """
        data = encode(noun)
        # Asked of the file, since a write that failed half-way leaves bytes behind.
        offset = self._file.tell()
        if offset > 0 and offset + len(data) > self._segment_bytes:
            self._file.close()
            self._open(self._segment + 1)
            offset = 0
        with writing(segment_path(self._folder, self._segment)):
            write_all(self._file.fileno(), data)
        return PayloadReference(
            segment=self._segment, offset=offset, length=len(data), digest=xxhash.xxh3_64_hexdigest(data)
        )

    def close(self) -> None:
        """Close the segment. May be called twice."""
        self._file.close()

    def _open(self, first: int) -> None:
        """Make a segment: the first number from ``first`` on that no other writer has taken."""
        for segment in itertools.count(first):
            path = segment_path(self._folder, segment)
            try:
                with writing(path):
                    self._file = path.open("xb", buffering=0)
            except FileExistsError:
                continue
            self._segment = segment
            return


def read_payload(folder: Path, reference: PayloadReference, noun: type[NounT]) -> NounT:
    """The noun that a reference names.

    Args:
        folder: The payload folder.
        reference: From :meth:`PayloadWriter.append`, or from the ledger.
        noun: Its type.

    Raises:
        RunFolderError: The segment is missing, too short, or holds other bytes; names segment and offset.
        CodecError: The bytes are whole but hold another noun, or one of another schema.
    """
    path = segment_path(folder, reference.segment)
    try:
        with path.open("rb") as file:
            file.seek(reference.offset)
            data = file.read(reference.length)
    except FileNotFoundError as error:
        raise _damaged(path, reference, "the file is missing") from error
    if len(data) != reference.length:
        raise _damaged(path, reference, f"{len(data)} of {reference.length} bytes are there")
    digest = xxhash.xxh3_64_hexdigest(data)
    if digest != reference.digest:
        raise _damaged(path, reference, f"the digest is {digest} and should be {reference.digest}")
    return decode(data, noun)


def _damaged(path: Path, reference: PayloadReference, how: str) -> RunFolderError:
    return RunFolderError(
        f"segment {reference.segment} is damaged at offset {reference.offset} ({path}): {how}; restore it from a copy"
    )
