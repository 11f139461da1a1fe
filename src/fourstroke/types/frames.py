"""Frames between a process and one that it placed: 8 bytes of length, then msgpack ``[head, parts]``.

``head`` names a verb or an outcome, ``parts`` are bytes of nouns (``types.codec``) or UTF-8 text. No pickle. Nothing
inside a part can end a frame, since its length goes before it.
"""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec

from fourstroke.errors import CodecError

Frame = tuple[str, list[bytes]]

_LENGTH = struct.Struct("<Q")
_decoder = msgspec.msgpack.Decoder(Frame)


def pack(head: str, parts: list[bytes]) -> bytes:
    """One frame.

    Example:
        >>> len(pack("start", []))
        16
    """
    body = msgspec.msgpack.encode((head, parts))
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """The next frame.

    Raises:
        asyncio.IncompleteReadError: The other side is gone.
        CodecError: What came is no frame.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _decoded(await reader.readexactly(length))


def receive_frame(connection: socket.socket) -> Frame | None:
    """The next frame, blocking; None where the other side is gone.

    Raises:
        CodecError: What came is no frame.
    """
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(connection, _LENGTH.unpack(head)[0])
    return None if body is None else _decoded(body)


def _decoded(body: bytes) -> Frame:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CodecError(f"not a frame: {error}") from error


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
