"""The one codec between processes and to disk: msgpack, a schema number per noun, arrays as dtype, shape and bytes.

A message is ``[noun, schema, body]``. Decoding builds only the nouns in :data:`SCHEMAS` and checks every field's type;
nothing in a message can name code to run, so bytes from an untrusted side are safe to decode.

    encode(noun) -> bytes          decode(bytes, Noun) -> noun
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from fourstroke.errors import CodecError
from fourstroke.types import nouns

SCHEMAS: dict[type[nouns.Noun], int] = {
    nouns.Assignment: 1,
    nouns.Batch: 1,
    nouns.BatchRecord: 2,
    nouns.Canary: 1,
    nouns.Completion: 1,
    nouns.Draw: 1,
    nouns.Episode: 1,
    nouns.EpisodeRecord: 2,
    nouns.Estimate: 1,
    nouns.GradedEpisode: 1,
    nouns.Group: 1,
    nouns.GroupRecord: 2,
    nouns.Message: 1,
    nouns.Microbatch: 1,
    nouns.Observation: 1,
    nouns.PayloadReference: 1,
    nouns.Publication: 1,
    nouns.RefusedGroup: 1,
    nouns.RowRecord: 2,
    nouns.RowShape: 2,
    nouns.SampleRequest: 1,
    nouns.Scored: 1,
    nouns.Span: 1,
    nouns.StepStats: 1,
    nouns.Tamper: 1,
    nouns.Task: 1,
    nouns.TensorEntry: 2,
    nouns.Timings: 1,
    nouns.ToolCall: 1,
    nouns.Trajectory: 1,
    nouns.Unscored: 1,
    nouns.VersionRun: 1,
    nouns.Wait: 1,
    nouns.WeightVersion: 1,
}

_DTYPES = {"bool", "int8", "uint8", "int32", "int64", "float32", "float64"}

NounT = TypeVar("NounT", bound=nouns.Noun)
OtherT = TypeVar("OtherT", bound=nouns.Noun)


def _array_to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert value.dtype.name in _DTYPES, value.dtype
        return [value.dtype.name, list(value.shape), np.ascontiguousarray(value).tobytes()]
    raise NotImplementedError(f"no wire form for {type(value).__name__}")


def _array_from_wire(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"no wire form for {kind.__name__}")
    match value:
        case [str(dtype), [*shape], bytes(raw)] if dtype in _DTYPES and all(
            isinstance(n, int) and n >= 0 for n in shape
        ):
            # A copy, since a view of the message would be read-only and would keep the whole message alive.
            return np.frombuffer(raw, dtype=dtype).reshape(shape).copy()
    raise ValueError("an array must be [dtype, shape, bytes]")


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_wire)
_header = msgspec.msgpack.Decoder(tuple[str, int, msgspec.Raw])
_decoders: dict[type[nouns.Noun], msgspec.msgpack.Decoder[Any]] = {
    noun: msgspec.msgpack.Decoder(noun, dec_hook=_array_from_wire) for noun in SCHEMAS
}


def encode(noun: nouns.Noun) -> bytes:
    """Bytes of a noun, with its name and schema number."""
    return _encoder.encode([type(noun).__name__, SCHEMAS[type(noun)], noun])


def decode(data: bytes, noun: type[NounT]) -> NounT:
    """The noun in ``data``.

    Raises:
        CodecError: ``data`` is damaged, holds another noun, or was written with another schema number.

    Example:
        >>> decode(encode(nouns.VersionRun(version=3, num_tokens=4)), nouns.VersionRun).version
        3
    """
    try:
        name, schema, body = _header.decode(data)
        if name != noun.__name__:
            raise CodecError(f"expected a {noun.__name__}, the message holds a {name}")
        if schema != SCHEMAS[noun]:
            raise CodecError(f"{name} has schema {schema}, this version reads schema {SCHEMAS[noun]}")
        decoded: NounT = _decoders[noun].decode(body)
    except (msgspec.MsgspecError, ValueError, AssertionError) as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"not a {noun.__name__}: {error}") from error
    return decoded


def decode_either(data: bytes, first: type[NounT], second: type[OtherT]) -> NounT | OtherT:
    """The noun in ``data``, which may be of two types.

    Raises:
        CodecError: As :func:`decode`.

    Example:
        >>> decode_either(encode(nouns.VersionRun(version=3, num_tokens=4)), nouns.Wait, nouns.VersionRun).num_tokens
        4
    """
    try:
        name, _, _ = _header.decode(data)
    except msgspec.MsgspecError as error:
        raise CodecError(f"neither {first.__name__} nor {second.__name__}: {error}") from error
    return decode(data, first) if name == first.__name__ else decode(data, second)
