"""Frames between the driver and a process that it placed: 8 bytes of length, then msgpack ``[head, parts]``.

``head`` names a verb or an outcome, ``parts`` are bytes of nouns (``types.codec``) or UTF-8 text. No pickle.
"""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec

_LENGTH = struct.Struct("<Q")
_decoder = msgspec.msgpack.Decoder(tuple[str, list[bytes]])


def pack(head: str, parts: list[bytes]) -> bytes:
    """One frame.

    Example:
        >>> len(pack("start", []))
        16
    """
    body = msgspec.msgpack.encode((head, parts))
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[str, list[bytes]]:
    """The next frame; ``asyncio.IncompleteReadError`` where the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _decoder.decode(await reader.readexactly(length))


def receive_frame(connection: socket.socket) -> tuple[str, list[bytes]] | None:
    """The next frame, blocking; None where the other side is gone."""
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(connection, _LENGTH.unpack(head)[0])
    return None if body is None else _decoder.decode(body)


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = connection.recv(min(num_bytes - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
