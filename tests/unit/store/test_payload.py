"""Payload comes back bit for bit, segments roll, and each kind of damage names segment and offset."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from fourstroke.errors import CodecError, RunFolderError
from fourstroke.store import PayloadWriter, read_payload
from fourstroke.types import Column, Message, PayloadReference, Trajectory


def _row(seed: int, *, num_tokens: int = 50) -> Trajectory:
    ids = np.random.default_rng(seed).integers(0, 1000, num_tokens, dtype=np.int32)
    return Trajectory(id=f"r{seed}", group="g", episode="e", columns={Column.IDS: ids})


def test_nouns_come_back_in_any_order_over_several_segments(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path, segment_bytes=1000)
    references = [writer.append(_row(seed)) for seed in range(20)]
    for seed in reversed(range(20)):  # the writer is still open
        row = read_payload(tmp_path, references[seed], Trajectory)
        assert row.id == f"r{seed}"
        np.testing.assert_array_equal(row[Column.IDS], _row(seed)[Column.IDS])
    writer.close()
    assert references[0] == PayloadReference(
        segment=0, offset=0, length=references[0].length, digest=references[0].digest
    )
    assert {reference.segment for reference in references} == set(range(references[-1].segment + 1))
    assert references[-1].segment > 0
    sizes = [path.stat().st_size for path in tmp_path.glob("segment-*.bin")]
    assert max(sizes) <= 1000
    assert sum(sizes) == sum(reference.length for reference in references)


def test_a_noun_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path, segment_bytes=100)
    references = [writer.append(_row(seed)) for seed in range(2)]
    writer.close()
    assert [(reference.segment, reference.offset) for reference in references] == [(0, 0), (1, 0)]


def test_a_new_writer_leaves_earlier_segments_alone(tmp_path: Path) -> None:
    for seed in range(2):
        writer = PayloadWriter(tmp_path)
        reference = writer.append(_row(seed))
        writer.close()
        assert reference.segment == seed
        assert reference.offset == 0


def test_writers_side_by_side_share_no_segment(tmp_path: Path) -> None:
    writers = [PayloadWriter(tmp_path, segment_bytes=1000) for _ in range(3)]
    references = [writers[seed % 3].append(_row(seed)) for seed in range(30)]
    for writer in writers:
        writer.close()

    for seed, reference in enumerate(references):
        assert read_payload(tmp_path, reference, Trajectory).id == f"r{seed}"
    owners = {reference.segment: set() for reference in references}
    for seed, reference in enumerate(references):
        owners[reference.segment].add(seed % 3)
    assert all(len(writers_of_it) == 1 for writers_of_it in owners.values())
    assert len(owners) > 3


def test_damage_names_segment_and_offset(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path)
    writer.append(_row(0))
    reference = writer.append(_row(1))
    writer.close()
    path = tmp_path / "segment-00000.bin"
    whole = path.read_bytes()
    where = rf"^segment 0 is damaged at offset {reference.offset} "

    flipped = bytearray(whole)
    flipped[reference.offset + 70] ^= 1
    path.write_bytes(bytes(flipped))
    with pytest.raises(RunFolderError, match=where + ".*the digest is"):
        read_payload(tmp_path, reference, Trajectory)

    path.write_bytes(whole[:-1])
    with pytest.raises(RunFolderError, match=where + f".*{reference.length - 1} of {reference.length} bytes"):
        read_payload(tmp_path, reference, Trajectory)

    path.unlink()
    with pytest.raises(RunFolderError, match=where + ".*missing"):
        read_payload(tmp_path, reference, Trajectory)


def test_another_noun_is_a_codec_error(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path)
    reference = writer.append(Message(role="user", content="hi"))
    writer.close()
    with pytest.raises(CodecError, match="the message holds a Message"):
        read_payload(tmp_path, reference, Trajectory)


def test_digest_is_xxh3_64_of_the_bytes(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path)
    reference = writer.append(Message(role="user", content="hi"))
    writer.close()
    # Another digest of the same bytes must not pass.
    wrong = msgspec.structs.replace(reference, digest="0" * 16)
    assert len(reference.digest) == 16
    with pytest.raises(RunFolderError, match="should be 0000000000000000"):
        read_payload(tmp_path, wrong, Message)


def test_a_write_that_failed_half_way_does_not_shift_later_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PayloadWriter(tmp_path)

    def half(descriptor: int, data: bytes) -> None:
        real(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    from fourstroke.store import payload

    real = payload.write_all
    with monkeypatch.context() as patch:
        patch.setattr(payload, "write_all", half)
        with pytest.raises(RunFolderError, match=r"segment-00000\.bin cannot be written, since its disk is full"):
            writer.append(_row(0))
    reference = writer.append(_row(1))
    writer.close()
    assert reference.offset > 0
    assert read_payload(tmp_path, reference, Trajectory).id == "r1"
