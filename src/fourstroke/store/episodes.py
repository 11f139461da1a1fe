"""Episodes of a run by what the ledger records of them: filters, counts and histograms, for readers alone.

    ledger.sqlite (read only) --new results, changed states--> an index in memory --> rows, counts

The ledger keeps a group's record as one blob, which no query can look into. The index holds the few columns that
filters need, takes up what is new when the ledger's files have changed, and never writes to the run folder.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec

from fourstroke.errors import RunFolderError
from fourstroke.store.files import stamp
from fourstroke.store.ledger_file import LedgerFile
from fourstroke.types import (
    EpisodeRecord,
    GroupRecord,
    PayloadReference,
    Scored,
    Tamper,
    Verdict,
    decode,
)

# Characters of a verdict's reason that the index keeps; the whole is in the payload.
_REASON_CHARS = 300
_RECORDS_AT_ONCE = 50

_CREATE = """
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    admitted_version INTEGER NOT NULL,
    state TEXT NOT NULL,
    dropped_for TEXT NOT NULL,
    step INTEGER,
    trained_version INTEGER
) STRICT;
CREATE INDEX groups_by_name ON groups (key, incarnation, attempt);
CREATE TABLE episodes (
    group_id INTEGER NOT NULL,
    member INTEGER NOT NULL,
    stop TEXT NOT NULL,
    verdict TEXT NOT NULL,
    score REAL,
    reason TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    PRIMARY KEY (group_id, member)
) STRICT, WITHOUT ROWID;
CREATE TABLE version_runs (group_id INTEGER NOT NULL, version INTEGER NOT NULL, num_tokens INTEGER NOT NULL) STRICT;
"""
_ROW = (
    "key, incarnation, attempt, member, task_id, state, dropped_for, step, stop, verdict, score, episodes.reason, "
    "num_tokens, admitted_version, oldest_version, newest_version, trained_version"
)
_JOINED = "FROM episodes JOIN groups ON groups.id = episodes.group_id"


class EpisodeOrder(StrEnum):
    """How a list of episodes is ordered."""

    NEWEST = "newest"
    OLDEST = "oldest"
    LOWEST_SCORE = "lowest score"
    HIGHEST_SCORE = "highest score"
    LONGEST = "longest"
    SHORTEST = "shortest"


_ORDER_BY = {
    EpisodeOrder.NEWEST: "group_id DESC, member",
    EpisodeOrder.OLDEST: "group_id, member",
    EpisodeOrder.LOWEST_SCORE: "score IS NULL, score, group_id DESC, member",
    EpisodeOrder.HIGHEST_SCORE: "score IS NULL, score DESC, group_id DESC, member",
    EpisodeOrder.LONGEST: "num_tokens DESC, group_id DESC, member",
    EpisodeOrder.SHORTEST: "num_tokens, group_id DESC, member",
}


class EpisodeFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which episodes to list; an empty text or None asks nothing.

    Attributes:
        state: State of the attempt: ``stored``, ``used``, ``dropped``.
        stop: Value of a ``StopReason``.
        verdict: ``scored``, ``unscored`` or ``tamper``.
        task: Beginning of the task's id.
        group: Beginning of the draw's key.
        reason: Part of the verdict's reason (its first 300 characters).
        step: Training step that used it.
        min_score: Least score.
        max_score: Largest score.
        min_tokens: Fewest sampled tokens.
        max_tokens: Most sampled tokens.

    Example:
        >>> EpisodeFilter(verdict="tamper").step is None
        True
    """

    state: str = ""
    stop: str = ""
    verdict: str = ""
    task: str = ""
    group: str = ""
    reason: str = ""
    step: int | None = None
    min_score: float | None = None
    max_score: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    def where(self) -> tuple[str, list[str | int | float]]:
        """The condition in SQL and its values."""
        asked: list[tuple[str, str | int | float | None]] = [
            ("state = ?", self.state or None),
            ("stop = ?", self.stop or None),
            ("verdict = ?", self.verdict or None),
            # INSTR, since the wildcards of LIKE may stand in what a user types.
            ("INSTR(task_id, ?) = 1", self.task or None),
            ("INSTR(key, ?) = 1", self.group or None),
            ("INSTR(episodes.reason, ?) > 0", self.reason or None),
            ("step = ?", self.step),
            ("score >= ?", self.min_score),
            ("score <= ?", self.max_score),
            ("num_tokens >= ?", self.min_tokens),
            ("num_tokens <= ?", self.max_tokens),
        ]
        used = [(text, value) for text, value in asked if value is not None]
        return " AND ".join(text for text, _ in used) or "TRUE", [value for _, value in used]


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One episode in a list. ``score`` is None unless the verdict is ``scored``; versions are None without tokens.

    Example:
        >>> row.score  # doctest: +SKIP
        1.0
    """

    key: str
    incarnation: int
    attempt: int
    member: int
    task_id: str
    state: str
    dropped_for: str
    step: int | None
    stop: str
    verdict: str
    score: float | None
    reason: str
    num_tokens: int
    admitted_version: int
    oldest_version: int | None
    newest_version: int | None
    trained_version: int | None


class EpisodePage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the episodes that match, and how many match in all.

    Example:
        >>> EpisodePage(rows=(), num_matches=0).num_matches
        0
    """

    rows: tuple[EpisodeRow, ...]
    num_matches: int


class EpisodeIndex:
    """The episodes of one ledger. May be asked from any thread.

    Args:
        ledger_path: The ledger; need not be there yet.

    Example:
        >>> EpisodeIndex(Path("nowhere.sqlite")).page(EpisodeFilter()).num_matches
        0
    """

    def __init__(self, ledger_path: Path) -> None:
        self._path = ledger_path
        self._lock = threading.Lock()
        self._signature: tuple[tuple[int, int] | None, ...] = ()
        self._connection = _empty_index()

    def page(
        self,
        chosen: EpisodeFilter,
        *,
        order: EpisodeOrder = EpisodeOrder.NEWEST,
        offset: int = 0,
        limit: int = 50,
    ) -> EpisodePage:
        """The episodes that match, from the ``offset``-th on.

        Raises:
            RunFolderError: The ledger is damaged or has another schema.
            CodecError: A record was written by another version of Fourstroke.
        """
        condition, values = chosen.where()
        with self._fresh() as connection:
            (num_matches,) = connection.execute(
                f"SELECT COUNT(*) {_JOINED} WHERE {condition}",
                values,
            ).fetchone()
            rows = connection.execute(
                f"SELECT {_ROW} {_JOINED} WHERE {condition} ORDER BY {_ORDER_BY[order]} LIMIT ? OFFSET ?",
                [*values, limit, offset],
            ).fetchall()
        return EpisodePage(rows=tuple(map(_row, rows)), num_matches=num_matches)

    def members(self, key: str, *, incarnation: int, attempt: int) -> tuple[EpisodeRow, ...]:
        """The members of one result, in order; none where there is no such result.

        Raises:
            RunFolderError: As :meth:`page`.
            CodecError: As :meth:`page`.
        """
        with self._fresh() as connection:
            rows = connection.execute(
                f"SELECT {_ROW} {_JOINED} WHERE key = ? AND incarnation = ? AND attempt = ? ORDER BY member",
                (key, incarnation, attempt),
            ).fetchall()
        return tuple(map(_row, rows))

    def scores_by_step(self) -> dict[int, list[list[float]]]:
        """Scores of the trained episodes: for each step, a list for each of its groups that has a score.

        Raises:
            RunFolderError: As :meth:`page`.
            CodecError: As :meth:`page`.
        """
        with self._fresh() as connection:
            rows = connection.execute(
                f"SELECT step, group_id, score {_JOINED} "
                "WHERE state = 'used' AND score IS NOT NULL ORDER BY step, group_id"
            ).fetchall()
        by_step: dict[int, dict[int, list[float]]] = {}
        for step, group, score in rows:
            by_step.setdefault(step, {}).setdefault(group, []).append(score)
        return {step: list(groups.values()) for step, groups in by_step.items()}

    def lengths(self) -> list[tuple[int, str, int]]:
        """Sampled tokens, stop reason, and how many episodes have them; of every result, used or not.

        Raises:
            RunFolderError: As :meth:`page`.
            CodecError: As :meth:`page`.
        """
        with self._fresh() as connection:
            return connection.execute(
                "SELECT num_tokens, stop, COUNT(*) FROM episodes GROUP BY num_tokens, stop ORDER BY num_tokens, stop"
            ).fetchall()

    def token_lags(self) -> dict[int, int]:
        """Trained tokens by lag: the version that they were trained on minus the one that sampled them.

        Raises:
            RunFolderError: As :meth:`page`.
            CodecError: As :meth:`page`.
        """
        with self._fresh() as connection:
            rows = connection.execute(
                "SELECT trained_version - version, SUM(num_tokens) FROM version_runs "
                "JOIN groups ON groups.id = version_runs.group_id WHERE state = 'used' GROUP BY 1 ORDER BY 1"
            ).fetchall()
        return dict(rows)

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        self._connection.close()

    @contextmanager
    def _fresh(self) -> Iterator[sqlite3.Connection]:
        """The index, brought up to date, for one thread at a time."""
        with self._lock:
            signature = tuple(map(stamp, ledger_files(self._path)))
            if signature != self._signature and self._path.is_file():
                self._take_up()
                self._signature = signature
            yield self._connection

    def _take_up(self) -> None:
        with closing(LedgerFile(self._path, is_read_only=True)) as file:
            (seen,) = self._connection.execute("SELECT COALESCE(MAX(id), 0) FROM groups").fetchone()
            # One instant of the ledger: a result and its state belong together.
            with file.transaction(kind="DEFERRED") as ledger:
                (last,) = ledger.execute("SELECT COALESCE(MAX(rowid), 0) FROM results").fetchone()
                if last < seen:  # another run's ledger lies here now
                    self._connection.close()
                    self._connection, seen = _empty_index(), 0
                results = ledger.execute("SELECT rowid, record FROM results WHERE rowid > ?", (seen,)).fetchall()
                states = ledger.execute(
                    "SELECT results.rowid, attempts.state, COALESCE(attempts.reason, ''), "
                    "CASE attempts.state WHEN 'used' THEN step END, "
                    "CASE attempts.state WHEN 'used' THEN trained_version END "
                    "FROM results JOIN attempts USING (key, incarnation, attempt) JOIN draws USING (key)"
                ).fetchall()
        self._connection.execute("BEGIN")
        try:
            # A part at a time, since many records alive at once are slow to make: the collector looks at them all.
            for first in range(0, len(results), _RECORDS_AT_ONCE):
                part = results[first : first + _RECORDS_AT_ONCE]
                self._add([(number, decode(record, GroupRecord)) for number, record in part])
            self._connection.executemany(
                "UPDATE groups SET state = ?2, dropped_for = ?3, step = ?4, trained_version = ?5 WHERE id = ?1", states
            )
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _add(self, records: Sequence[tuple[int, GroupRecord]]) -> None:
        self._connection.executemany(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, '', '', NULL, NULL)",
            (
                (number, record.id, record.incarnation, record.attempt, record.draw.task_id, record.admitted_version)
                for number, record in records
            ),
        )
        self._connection.executemany(
            "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (_columns(number, episode) for number, record in records for episode in record.episodes),
        )
        self._connection.executemany(
            "INSERT INTO version_runs VALUES (?, ?, ?)",
            (
                (number, version, num_tokens)
                for number, record in records
                for version, num_tokens in _tokens_by_version(record).items()
            ),
        )


def read_reference(ledger_path: Path, key: str, *, incarnation: int, attempt: int) -> PayloadReference:
    """Where the group of one result lies in the payload.

    Raises:
        RunFolderError: There is no such result, or the ledger cannot be read.
    """
    with closing(LedgerFile(ledger_path, is_read_only=True)) as file, file.naming_faults():
        row = file.connection.execute(
            'SELECT segment, "offset", length, digest FROM results WHERE key = ? AND incarnation = ? AND attempt = ?',
            (key, incarnation, attempt),
        ).fetchone()
    if row is None:
        raise RunFolderError(
            f"{ledger_path} has no result of draw {key}, incarnation {incarnation}, attempt {attempt}; name another"
        )
    segment, offset, length, digest = row
    return PayloadReference(segment=segment, offset=offset, length=length, digest=digest)


def _empty_index() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.executescript(_CREATE)
    return connection


def ledger_files(ledger_path: Path) -> tuple[Path, Path]:
    """The ledger's file and its log: one of them changes whenever somebody has written to the ledger.

    Example:
        >>> [path.name for path in ledger_files(Path("ledger.sqlite"))]
        ['ledger.sqlite', 'ledger.sqlite-wal']
    """
    return ledger_path, ledger_path.with_name(f"{ledger_path.name}-wal")


def _columns(number: int, episode: EpisodeRecord) -> Sequence[str | int | float | None]:
    kind, score, reason = _verdict(episode.verdict)
    versions = [run.version for run in episode.versions]
    return (
        number,
        episode.member,
        episode.stop.value,
        kind,
        score,
        (episode.failure or reason)[:_REASON_CHARS],
        episode.num_sampled_tokens,
        min(versions, default=None),
        max(versions, default=None),
    )


def _tokens_by_version(record: GroupRecord) -> Counter[int]:
    """Sampled tokens of a group by the version that sampled them."""
    tokens: Counter[int] = Counter()
    for episode in record.episodes:
        for run in episode.versions:
            tokens[run.version] += run.num_tokens
    return tokens


def _verdict(verdict: Verdict) -> tuple[str, float | None, str]:
    if isinstance(verdict, Scored):
        return "scored", verdict.score, verdict.reason
    if isinstance(verdict, Tamper):
        return "tamper", None, verdict.reason
    return "unscored", None, f"{verdict.reason}: {verdict.detail}"


def _row(values: Iterable[object]) -> EpisodeRow:
    return msgspec.convert(dict(zip(EpisodeRow.__struct_fields__, values, strict=True)), EpisodeRow)
