"""The ledger: what became of every draw, in SQLite.

             admit                 mark_trained
    (none) --------> pending -----------------------> trained
                        |         mark_dropped
                        '---------------------------> dropped (reason)

    drawn = trained + dropped + pending, at every instant and after any crash.

Each arrow is one transaction, and the guard is in its SQL: a draw is admitted once, and leaves ``pending`` once. The
left side of the balance is a counter of its own, raised in the transaction of the admission, so that a row that went
missing shows. WAL with ``synchronous=NORMAL``: a killed process loses nothing; a power cut loses at most the last
transactions, never the balance. One writer, on the thread that opened it; readers may look at any time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fourstroke.errors import RunFolderError
from fourstroke.store.files import full_disk
from fourstroke.types import Draw, PayloadReference

LEDGER_SCHEMA = 1

_CREATE = """
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE draws (
    key TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    draw_index INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'trained', 'dropped')),
    reason TEXT CHECK ((reason IS NOT NULL) = (state = 'dropped')),
    step INTEGER CHECK ((step IS NOT NULL) = (state = 'trained')),
    admitted_version INTEGER NOT NULL,
    trained_version INTEGER CHECK ((trained_version IS NOT NULL) = (state = 'trained'))
) STRICT, WITHOUT ROWID;
CREATE INDEX draws_by_state ON draws (state, reason);
CREATE TABLE groups (
    key TEXT PRIMARY KEY REFERENCES draws (key),
    segment INTEGER NOT NULL,
    "offset" INTEGER NOT NULL,
    length INTEGER NOT NULL,
    digest TEXT NOT NULL,
    num_scored INTEGER NOT NULL,
    num_members INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"""


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The balance at one instant. ``drawn`` comes from the counter, the rest from the rows.

    Example:
        >>> Audit(drawn=3, trained=1, dropped=1, pending=1, balanced=True, dropped_by_reason={"stale": 1}).balanced
        True
    """

    drawn: int
    trained: int
    dropped: int
    pending: int
    balanced: bool
    dropped_by_reason: dict[str, int]


class Ledger:
    """The ledger of one run folder. Errors name the draw's key.

    Args:
        path: The file; made if it is missing, unless only read.
        is_read_only: Look at a ledger that another process may be writing.

    Raises:
        RunFolderError: The file is missing (read only), no ledger, or has a newer schema.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     ledger = Ledger(Path(folder, "ledger.sqlite"))
        ...     ledger.admit(Draw(epoch=0, index=0, task_id="9f2c", seed=7), version=0)
        ...     ledger.mark_trained(["e0000-i000000"], step=0, version=0)
        ...     audit = ledger.audit()
        ...     ledger.close()
        >>> audit.drawn, audit.trained, audit.pending, audit.balanced
        (1, 1, 0, True)
    """

    def __init__(self, path: Path, *, is_read_only: bool = False) -> None:
        self._path = path
        if is_read_only and not path.is_file():
            raise RunFolderError(f"{path} is missing, so there is no ledger to read; name the folder of a run")
        mode = "mode=rwc"
        if is_read_only:
            # Without a log nobody writes: read the file alone, which leaves nothing beside it and needs no right to.
            has_log = path.with_name(f"{path.name}-wal").exists()
            mode = "mode=ro" if has_log else "mode=ro&immutable=1"
        uri = f"{path.absolute().as_uri()}?{mode}"
        with self._naming_faults():
            self._connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        try:
            with self._naming_faults():
                self._prepare(is_read_only=is_read_only)
        except RunFolderError:
            self._connection.close()
            raise

    def admit(self, draw: Draw, *, version: int) -> None:
        """Take a draw into the ledger as pending.

        Args:
            draw: The draw; its key must be new.
            version: Newest routable weight version now; lag counts from it.

        Raises:
            RunFolderError: The draw was admitted before.
        """
        with self._transaction():
            added = self._connection.execute(
                "INSERT INTO draws (key, epoch, draw_index, task_id, seed, state, admitted_version) "
                "VALUES (?, ?, ?, ?, ?, 'pending', ?) ON CONFLICT (key) DO NOTHING",
                (draw.key, draw.epoch, draw.index, draw.task_id, draw.seed, version),
            )
            if added.rowcount != 1:
                raise RunFolderError(f"draw {draw.key} was admitted before, and a draw is admitted once")
            self._connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'drawn'")

    def store_group(self, key: str, reference: PayloadReference, *, num_scored: int, num_members: int) -> None:
        """Record where the finished group of a pending draw lies. The payload must be written already.

        Raises:
            RunFolderError: The draw is not pending, or has a group already.
        """
        with self._transaction():
            added = self._connection.execute(
                "INSERT INTO groups SELECT key, ?, ?, ?, ?, ?, ? FROM draws WHERE key = ? AND state = 'pending' "
                "ON CONFLICT (key) DO NOTHING",
                (
                    reference.segment,
                    reference.offset,
                    reference.length,
                    reference.digest,
                    num_scored,
                    num_members,
                    key,
                ),
            )
            if added.rowcount != 1:
                raise RunFolderError(f"draw {key} takes no group, since it {self._standing(key)} or has one already")

    def mark_trained(self, keys: Iterable[str], *, step: int, version: int) -> None:
        """Pending to trained, for all of a step's draws or for none.

        Args:
            keys: Keys of the draws.
            step: The training step.
            version: Weight version that they were trained on (before the update).

        Raises:
            RunFolderError: One of them is not pending; nothing was changed.
        """
        with self._transaction():
            for key in keys:
                self._leave_pending(
                    key, "state = 'trained', step = ?, trained_version = ?", values=(step, version), becoming="trained"
                )

    def mark_dropped(self, key: str, *, reason: str) -> None:
        """Pending to dropped.

        Raises:
            RunFolderError: The draw is not pending.
        """
        with self._transaction():
            self._leave_pending(key, "state = 'dropped', reason = ?", values=(reason,), becoming="dropped")

    def references(self) -> dict[str, PayloadReference]:
        """Where each stored group lies, by the draw's key, in the order of keys."""
        with self._naming_faults():
            rows = self._connection.execute(
                'SELECT key, segment, "offset", length, digest FROM groups ORDER BY key'
            ).fetchall()
        return {
            key: PayloadReference(segment=segment, offset=offset, length=length, digest=digest)
            for key, segment, offset, length, digest in rows
        }

    def audit(self) -> Audit:
        """The balance now, of one instant even while another process writes."""
        with self._transaction(kind="DEFERRED"):
            drawn = self._meta("drawn")
            rows = self._connection.execute("SELECT state, reason, COUNT(*) FROM draws GROUP BY state, reason")
            counts = {"pending": 0, "trained": 0, "dropped": 0}
            by_reason: dict[str, int] = {}
            for state, reason, count in rows:
                counts[state] += count
                if reason is not None:
                    by_reason[reason] = count
        return Audit(
            drawn=drawn,
            trained=counts["trained"],
            dropped=counts["dropped"],
            pending=counts["pending"],
            balanced=drawn == sum(counts.values()),
            dropped_by_reason=by_reason,
        )

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._connection.close()

    def _prepare(self, *, is_read_only: bool) -> None:
        if not is_read_only:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            with self._transaction():
                if not self._has_tables():
                    for statement in _CREATE.split(";"):
                        self._connection.execute(statement)
                    self._connection.execute("INSERT INTO meta VALUES ('schema', ?), ('drawn', 0)", (LEDGER_SCHEMA,))
        if not self._has_tables():
            raise RunFolderError(f"{self._path} holds no ledger yet; wait for its run to start, or name another folder")
        schema = self._meta("schema")
        if schema > LEDGER_SCHEMA:
            raise RunFolderError(
                f"{self._path} has ledger schema {schema} and this version of Fourstroke reads up to {LEDGER_SCHEMA}; "
                "use a newer Fourstroke"
            )

    def _has_tables(self) -> bool:
        return self._connection.execute("SELECT 1 FROM sqlite_master").fetchone() is not None

    def _meta(self, name: str) -> int:
        row = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise RunFolderError(f"{self._path} is damaged: it has no {name!r}; restore it from a copy")
        return int(row[0])

    def _leave_pending(self, key: str, assignments: str, *, values: tuple[int | str, ...], becoming: str) -> None:
        changed = self._connection.execute(
            f"UPDATE draws SET {assignments} WHERE key = ? AND state = 'pending'",  # noqa: S608 - text of our own
            (*values, key),
        )
        if changed.rowcount != 1:
            raise RunFolderError(f"draw {key} cannot become {becoming}, since it {self._standing(key)}")

    def _standing(self, key: str) -> str:
        row = self._connection.execute("SELECT state FROM draws WHERE key = ?", (key,)).fetchone()
        return "was never admitted" if row is None else f"is {row[0]}"

    @contextmanager
    def _transaction(self, *, kind: str = "IMMEDIATE") -> Iterator[None]:
        with self._naming_faults():
            self._connection.execute(f"BEGIN {kind}")
            try:
                yield
                self._connection.execute("COMMIT")
            finally:
                # Still open only if something was raised; SQLite itself may have rolled back (a full disk).
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def _naming_faults(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            # The low byte is the kind of fault; the rest only details it.
            match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF:
                case sqlite3.SQLITE_FULL:
                    raise full_disk(self._path) from error
                case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                    raise RunFolderError(f"{self._path} is damaged ({error}); restore it from a copy") from error
                case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY:
                    raise RunFolderError(f"{self._path} cannot be opened ({error}); mend its permissions") from error
            raise
