"""Frames come out as they went in, whatever their parts hold; what is cut or no frame is told apart."""

import asyncio
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.errors import CodecError
from fourstroke.types.frames import Frame, pack, read_frame, receive_frame

FRAMES = st.lists(st.tuples(st.text(st.characters(codec="utf-8")), st.lists(st.binary(max_size=200))), max_size=4)


def read_all(data: bytes, num_frames: int) -> list[Frame]:
    async def read() -> list[Frame]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return [await read_frame(reader) for _ in range(num_frames)]

    return asyncio.run(read())


@given(FRAMES)
def test_frames_come_out_as_they_went_in(frames: list[Frame]) -> None:
    data = b"".join(pack(head, parts) for head, parts in frames)

    assert read_all(data, len(frames)) == frames


def test_a_part_that_looks_like_a_frame_is_a_part() -> None:
    inner = pack("verdict", [b"1"])

    assert read_all(pack("grade", [inner, inner[8:]]), 1) == [("grade", [inner, inner[8:]])]


def test_the_blocking_side_reads_the_same_and_sees_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack("a", [b"x" * 10_000]) + pack("b", []) + pack("c", [b"cut"])[:-1])
        ours.close()

        assert receive_frame(theirs) == ("a", [b"x" * 10_000])
        assert receive_frame(theirs) == ("b", [])
        assert receive_frame(theirs) is None


def test_a_cut_frame_is_an_end() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        read_all(pack("a", [b"x"])[:-1], 1)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x01", b"\x92\xa1a\x91\xa1x", pack("a", [])[8:] + b"\x00"])
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    data = struct.pack("<Q", len(body)) + body
    with pytest.raises(CodecError, match="not a frame"):
        read_all(data, 1)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        with pytest.raises(CodecError, match="not a frame"):
            receive_frame(theirs)
