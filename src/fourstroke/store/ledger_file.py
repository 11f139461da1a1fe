"""The ledger's file: its tables, how it is opened, its transactions, and the names of its faults.

Knows the tables but makes no move in them; that is ``ledger``. WAL with ``synchronous=NORMAL``: a killed process loses
nothing; a power cut loses at most the last transactions, never half of one. One writer, on the thread that opened it;
readers may look at any time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fourstroke.errors import RunFolderError
from fourstroke.store.files import full_disk

LEDGER_SCHEMA = 2

# `used_key` points to `trained_key`, so SQLite commits no attempt as used unless its draw is trained, and never two of
# one draw: with as many used attempts as trained draws, each trained draw has exactly one. The indexes by outcome hold
# all that an audit counts (`lag` is no generated column, since SQLite would look those up row by row); that of attempts
# leads with the reason, so that a search for one draw's attempts in a state goes by the draw. Results lie apart from
# attempts, so that a change of state does not rewrite them.
_CREATE = """
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE incarnations (
    number INTEGER PRIMARY KEY,
    from_step INTEGER NOT NULL CHECK (from_step >= 0),
    reason TEXT NOT NULL
) STRICT;
CREATE TABLE draws (
    key TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    draw_index INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'trained', 'dropped')),
    reason TEXT CHECK ((reason IS NOT NULL) = (state = 'dropped')),
    step INTEGER CHECK ((step IS NULL) = (state = 'pending')),
    admitted_version INTEGER NOT NULL,
    trained_version INTEGER CHECK ((trained_version IS NOT NULL) = (state = 'trained')),
    lag INTEGER CHECK (lag IS trained_version - admitted_version),
    trained_key TEXT GENERATED ALWAYS AS (CASE state WHEN 'trained' THEN key END) UNIQUE,
    UNIQUE (epoch, draw_index)
) STRICT, WITHOUT ROWID;
CREATE INDEX draws_by_outcome ON draws (state, reason, lag);
CREATE TABLE attempts (
    key TEXT NOT NULL REFERENCES draws (key),
    incarnation INTEGER NOT NULL REFERENCES incarnations (number),
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'stored', 'used', 'dropped')),
    reason TEXT CHECK ((reason IS NOT NULL) = (state = 'dropped')),
    admitted_version INTEGER NOT NULL,
    num_episodes INTEGER NOT NULL,
    used_key TEXT GENERATED ALWAYS AS (CASE state WHEN 'used' THEN key END) UNIQUE
        REFERENCES draws (trained_key) DEFERRABLE INITIALLY DEFERRED,
    PRIMARY KEY (key, incarnation, attempt)
) STRICT, WITHOUT ROWID;
CREATE INDEX attempts_by_outcome ON attempts (reason, state);
CREATE TABLE results (
    key TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    segment INTEGER NOT NULL,
    "offset" INTEGER NOT NULL,
    length INTEGER NOT NULL,
    digest TEXT NOT NULL,
    record BLOB NOT NULL,
    PRIMARY KEY (key, incarnation, attempt),
    FOREIGN KEY (key, incarnation, attempt) REFERENCES attempts (key, incarnation, attempt)
) STRICT;
"""


class LedgerFile:
    """The open file of a ledger, made if it is missing unless it is only read.

    Raises:
        RunFolderError: The file is missing (read only), no ledger, damaged, or has another schema.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = LedgerFile(Path(folder, "ledger.sqlite"), is_read_only=False)
        ...     schema = file.meta("schema")
        ...     file.close()
        >>> schema
        2
    """

    def __init__(self, path: Path, *, is_read_only: bool) -> None:
        self._path = path
        if is_read_only and not path.is_file():
            raise RunFolderError(f"{path} is missing, so there is no ledger to read; name the folder of a run")
        mode = "mode=rwc"
        if is_read_only:
            # Without a log nobody writes: read the file alone, which leaves nothing beside it and needs no right to.
            has_log = path.with_name(f"{path.name}-wal").exists()
            mode = "mode=ro" if has_log else "mode=ro&immutable=1"
        uri = f"{path.absolute().as_uri()}?{mode}"
        with self.naming_faults():
            self.connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        try:
            with self.naming_faults():
                self._prepare(is_read_only=is_read_only)
        except RunFolderError:
            self.connection.close()
            raise

    def meta(self, name: str) -> int:
        """A number that the file keeps beside its rows.

        Raises:
            RunFolderError: It is not there.
        """
        row = self.connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise RunFolderError(f"{self._path} is damaged: it has no {name!r}; restore it from a copy")
        return int(row[0])

    def count(self, name: str) -> None:
        """Raise one of these numbers by one."""
        self.connection.execute("UPDATE meta SET value = value + 1 WHERE name = ?", (name,))

    @contextmanager
    def transaction(self, *, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """All of what is done inside, or nothing if something is raised."""
        with self.naming_faults():
            self.connection.execute(f"BEGIN {kind}")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            finally:
                # Still open only if something was raised; SQLite itself may have rolled back (a full disk).
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")

    @contextmanager
    def naming_faults(self) -> Iterator[None]:
        """Turn the faults that a user can mend into one sentence; others propagate.

        Raises:
            RunFolderError: A full disk, a damaged file, or one that may not be opened or written.
        """
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

    def close(self) -> None:
        """Close the file. May be called twice."""
        self.connection.close()

    def _prepare(self, *, is_read_only: bool) -> None:
        if not is_read_only:
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = NORMAL")
            self.connection.execute("PRAGMA foreign_keys = ON")
            with self.transaction():
                if not self._has_tables():
                    for statement in _CREATE.split(";"):
                        self.connection.execute(statement)
                    self.connection.execute(
                        "INSERT INTO meta VALUES ('schema', ?), ('drawn', 0), ('attempts', 0), ('late', 0)",
                        (LEDGER_SCHEMA,),
                    )
        if not self._has_tables():
            raise RunFolderError(f"{self._path} holds no ledger yet; wait for its run to start, or name another folder")
        schema = self.meta("schema")
        if schema < LEDGER_SCHEMA:
            raise RunFolderError(
                f"{self._path} has ledger schema {schema}, made by an earlier version of Fourstroke; finish it with "
                "that one"
            )
        if schema > LEDGER_SCHEMA:
            raise RunFolderError(
                f"{self._path} has ledger schema {schema} and this version of Fourstroke reads up to {LEDGER_SCHEMA}; "
                "use a newer Fourstroke"
            )

    def _has_tables(self) -> bool:
        return self.connection.execute("SELECT 1 FROM sqlite_master").fetchone() is not None
