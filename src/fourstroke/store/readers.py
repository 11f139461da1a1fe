"""Reading a run folder's line files and summary. Never writes; fit for a run that is still going or was killed.

A line counts once its end is written: a last line without one was torn by a kill and is passed over. Damage anywhere
else is an error that names the line.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

import msgspec

from fourstroke.errors import RunFolderError
from fourstroke.observability import Event, WaitsReport
from fourstroke.store.summary import Summary

T = TypeVar("T")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Records of ``metrics.jsonl`` by step; a value that was not finite reads as NaN.

    A resumed run writes the steps after its checkpoint again: the last record of a step counts.

    Raises:
        RunFolderError: The file is missing, or a line before the last is damaged.
    """
    records = _read_lines(path, msgspec.json.Decoder(dict[str, float | None]))
    by_step = {record["step"]: record for record in records}
    return [
        {name: math.nan if value is None else value for name, value in by_step[step].items()}
        for step in sorted(by_step, key=lambda step: step or 0)
    ]


def read_events(path: Path) -> list[Event]:
    """Events of ``events.jsonl`` in order.

    Raises:
        RunFolderError: The file is missing, or a line before the last is damaged.
    """
    return _read_lines(path, msgspec.json.Decoder(Event))


def read_summary(path: Path) -> Summary:
    """The summary in ``summary.json``.

    Raises:
        RunFolderError: The file is missing (the run has not ended) or damaged.
    """
    try:
        return msgspec.json.decode(_read(path), type=Summary)
    except msgspec.MsgspecError as error:
        raise RunFolderError(f"{path} is no summary ({error}); restore it from a copy") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunFolderError(f"{path} is missing; name the folder of a run that has one") from error


def _read_lines(path: Path, decoder: msgspec.json.Decoder[T]) -> list[T]:
    *lines, _torn = _read(path).split(b"\n")
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            values.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise RunFolderError(f"line {number} of {path} is damaged ({error}); remove it or restore it") from error
    return values


def read_waits(path: Path) -> WaitsReport:
    """The report in ``waits.json``.

    Raises:
        RunFolderError: The file is missing (the run never came so far) or damaged.
    """
    try:
        return msgspec.json.decode(_read(path), type=WaitsReport)
    except msgspec.MsgspecError as error:
        raise RunFolderError(f"{path} is damaged ({error}); wait a second and ask again") from error
