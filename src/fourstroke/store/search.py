"""Episodes of a run with their replies, by what the ledger records and by what they say. For readers alone."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import msgspec

from fourstroke.errors import RunFolderError
from fourstroke.store.episodes import EpisodeFilter, EpisodeIndex, EpisodeOrder, EpisodeRow, read_reference
from fourstroke.store.payload import read_payload
from fourstroke.store.run_folder import RunFolder
from fourstroke.types import Group

_ROWS_AT_ONCE = 500


class FoundEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """One episode with its text.

    Attributes:
        row: What the ledger records of it.
        reply: Its last reply; hostile text, as the model wrote it. Empty where the payload cannot be read.
        problem: Why it cannot be read; empty if it can.

    Example:
        >>> found.row.score, found.reply  # doctest: +SKIP
        (1.0, '7')
    """

    row: EpisodeRow
    reply: str
    problem: str


def read_group(run: RunFolder, key: str, *, incarnation: int, attempt: int) -> Group:
    """The group of one result, whole.

    Raises:
        RunFolderError: There is no such result, or its payload is gone or damaged.
        CodecError: It was written by another version of Fourstroke.

    Example:
        >>> read_group(run, "e0000-i000002", incarnation=0, attempt=0).id  # doctest: +SKIP
        'e0000-i000002'
    """
    reference = read_reference(run.ledger_path, key, incarnation=incarnation, attempt=attempt)
    return read_payload(run.payload_dir, reference, Group)


def search_episodes(run: RunFolder, chosen: EpisodeFilter, *, text: str, limit: int) -> tuple[list[FoundEpisode], bool]:
    """The newest episodes that match, and whether there are more than ``limit`` of them.

    Args:
        run: The run; may be going on.
        chosen: What the ledger's record must be like.
        text: What the reply must hold, by letters of any case; every reply of a match is read for it. Empty: anything.
        limit: Most episodes to return, 1 or more.

    Raises:
        RunFolderError: The ledger is damaged or has another schema.

    Example:
        >>> search_episodes(run, EpisodeFilter(step=3), text="", limit=10)  # doctest: +SKIP
        ([FoundEpisode(...), ...], True)
    """
    with contextlib.closing(EpisodeIndex(run.ledger_path)) as index:
        matches = (found for found in _with_replies(run, _rows(index, chosen)) if _says(found, text))
        found = list(itertools.islice(matches, limit + 1))
    return found[:limit], len(found) > limit


def _rows(index: EpisodeIndex, chosen: EpisodeFilter) -> Iterator[EpisodeRow]:
    for offset in itertools.count(0, _ROWS_AT_ONCE):
        page = index.page(chosen, order=EpisodeOrder.NEWEST, offset=offset, limit=_ROWS_AT_ONCE)
        yield from page.rows
        if len(page.rows) < _ROWS_AT_ONCE:
            return


def _with_replies(run: RunFolder, rows: Iterator[EpisodeRow]) -> Iterator[FoundEpisode]:
    """Members of one group stand together, so that each group is read once."""
    for (key, incarnation, attempt), members in itertools.groupby(rows, lambda r: (r.key, r.incarnation, r.attempt)):
        replies, problem = {}, ""
        try:
            group = read_group(run, key, incarnation=incarnation, attempt=attempt)
            replies = {member.episode.member: member.episode.reply for member in group.members}
        except RunFolderError as error:
            problem = str(error)
        for row in members:
            yield FoundEpisode(row=row, reply=replies.get(row.member, ""), problem=problem)


def _says(found: FoundEpisode, text: str) -> bool:
    return text.casefold() in found.reply.casefold()
