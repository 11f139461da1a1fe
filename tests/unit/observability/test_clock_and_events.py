"""Wall time carries its zone; an event survives its line."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from fourstroke.observability import Event, EventKind, unix_now, utc_now


def test_both_clocks_tell_one_time_in_utc() -> None:
    earlier, now, later = unix_now(), utc_now(), unix_now()
    assert now.utcoffset() == timedelta(0)
    assert earlier - 1e-3 <= now.timestamp() <= later + 1e-3


def test_event_round_trip_keeps_the_types_of_its_fields() -> None:
    event = Event(kind=EventKind.FAULT, time_s=1.5, fields={"text": "a\nb\x1b", "count": 3, "share": 3.0})
    line = msgspec.json.encode(event)
    assert b"\n" not in line
    back = msgspec.json.decode(line, type=Event)
    assert back == event
    assert [type(value) for value in back.fields.values()] == [str, int, float]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="party"):
        msgspec.json.decode(b'{"kind":"party","time_s":0}', type=Event)
