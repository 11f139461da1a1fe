"""The ledger: what became of every draw, and of every attempt to roll it out, in SQLite.

    a draw      admit                 mark_trained
       (none) --------> pending -----------------------> trained (step, version)
                        ^  |  ^       mark_dropped                  |
                        |  |  '-------- new incarnation ------------'  trained at a step > from_step
                        |  '---------------------------> dropped (reason, step)
                        '-------------- new incarnation ------------'  dropped in a step > from_step

    an attempt  begin_attempt         receive            mark_trained
       (none) --------------> pending -------> stored ------------------> used
                                 |                |  ^-- new incarnation --'  its draw trained at a step > from_step
                                 |                '--- drop_attempt, mark_dropped ---.
                                 '-- drop_attempt, mark_dropped, new incarnation ----'--> dropped (reason)

    drawn    = trained + dropped + pending
    attempts = used + dropped + pending (stored ones among them)       one used attempt for each trained draw
    at every instant and after any crash.

Each arrow is one transaction, and the guard is in its SQL. The left sides are counters of their own, raised in the
transaction that adds the row, so that a row that went missing shows.

An incarnation is one life of the run's process. It goes on from the checkpoint of ``from_step``: what was trained up to
there is in those weights and never returns; what came later is undone, and its results are kept to be used again. So
along the steps that led to the weights of today no draw is trained twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from fourstroke.errors import RunFolderError
from fourstroke.store.ledger_file import LedgerFile
from fourstroke.types import Draw, GroupRecord, PayloadReference, decode, encode

# Reason of the attempts that were still being rolled out when their incarnation ended.
LOST = "lost"

# The step that the current incarnation resumed from.
_FROM_STEP = "COALESCE((SELECT from_step FROM incarnations ORDER BY number DESC LIMIT 1), 0)"


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The balances at one instant. ``drawn`` and ``attempts`` come from counters, the rest from the rows.

    Attributes:
        drawn: Draws admitted so far.
        trained: Those trained; a resume takes back what its checkpoint does not hold.
        dropped: Those given up.
        pending: The others.
        balanced: Both balances hold, and each trained draw has exactly one used attempt.
        dropped_by_reason: ``dropped`` by reason.
        attempts: Attempts begun so far.
        attempts_used: Those whose episodes were trained.
        attempts_dropped: Those given up, lost with their incarnation, or dropped with their draw.
        attempts_pending: The others: being rolled out, or stored and not trained yet.
        attempts_dropped_by_reason: ``attempts_dropped`` by reason.
        late: Results that came too late to be kept, duplicates among them.
        lags: Trained draws by lag: the version trained on minus the version at admission.
        max_lag: The largest of these; 0 if nothing was trained.
        incarnations: Incarnations opened so far.

    Example:
        >>> audit = Audit(drawn=3, trained=1, dropped=1, pending=1, balanced=True, dropped_by_reason={"stale": 1},
        ...               attempts=3, attempts_used=1, attempts_dropped=1, attempts_pending=1,
        ...               attempts_dropped_by_reason={"stale": 1}, late=0, lags={2: 1}, max_lag=2, incarnations=1)
        >>> audit.balanced
        True
    """

    drawn: int
    trained: int
    dropped: int
    pending: int
    balanced: bool
    dropped_by_reason: dict[str, int]
    attempts: int
    attempts_used: int
    attempts_dropped: int
    attempts_pending: int
    attempts_dropped_by_reason: dict[str, int]
    late: int
    lags: dict[int, int]
    max_lag: int
    incarnations: int


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """One life of the run's process: the step of the checkpoint that it resumed from (0: fresh weights), and why.

    Example:
        >>> Incarnation(number=1, from_step=12, reason="resume").from_step
        12
    """

    number: int
    from_step: int
    reason: str


class PendingDraw(msgspec.Struct, frozen=True, kw_only=True):
    """A draw that is neither trained nor dropped, and what it takes to go on with it.

    Attributes:
        draw: The draw.
        admitted_version: Newest routable weight version when it last took a slot.
        next_attempt: Number that its next attempt takes in the current incarnation.
        stored: Its result, of this or an earlier incarnation, where there is one to use.

    Example:
        >>> draw = Draw(epoch=0, index=12, task_id="9f2c", seed=7)
        >>> PendingDraw(draw=draw, admitted_version=3, next_attempt=0, stored=None).stored is None
        True
    """

    draw: Draw
    admitted_version: int
    next_attempt: int
    stored: GroupRecord | None


class Ledger:
    """The ledger of one run folder. Errors name the draw's key, and what raises has changed nothing.

    Args:
        path: The file; made if it is missing, unless only read.
        is_read_only: Look at a ledger that another process may be writing.

    Raises:
        RunFolderError: The file is missing (read only), no ledger, damaged, or has another schema.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> draw = Draw(epoch=0, index=0, task_id="9f2c", seed=7)
        >>> reference = PayloadReference(segment=0, offset=0, length=120, digest="0123456789abcdef")
        >>> record = GroupRecord(draw=draw, admitted_version=0, incarnation=0, attempt=0, episodes=(),
        ...                      reference=reference)
        >>> with TemporaryDirectory() as folder:
        ...     ledger = Ledger(Path(folder, "ledger.sqlite"))
        ...     incarnation = ledger.open_incarnation(from_step=0, reason="start")
        ...     ledger.admit(draw, version=0)
        ...     ledger.begin_attempt(draw.key, incarnation=incarnation, attempt=0, version=0, num_episodes=0)
        ...     receipts = ledger.receive(record), ledger.receive(record)
        ...     ledger.mark_trained([draw.key], step=1, version=0)
        ...     audit = ledger.audit()
        ...     ledger.close()
        >>> receipts
        (True, False)
        >>> audit.drawn, audit.trained, audit.pending, audit.attempts_used, audit.late, audit.balanced
        (1, 1, 0, 1, 1, True)
    """

    def __init__(self, path: Path, *, is_read_only: bool = False) -> None:
        self._file = LedgerFile(path, is_read_only=is_read_only)

    # --- incarnations -----------------------------------------------------------------------------------------------

    def open_incarnation(self, *, from_step: int, reason: str) -> int:
        """Begin a life of the run: undo what came after the checkpoint of ``from_step``, and what was under way.

        Draws trained or dropped in a later step return to pending. Their used attempts are stored again; attempts that
        were dropped stay dropped. Attempts that were being rolled out are dropped as ``lost``.

        Args:
            from_step: Last step that the weights hold; 0 for fresh ones. The checkpoints of later steps must be gone
                by now: their weights hold draws that are pending again.
            reason: Why, for people.

        Returns:
            The incarnation's number; the first is 0.

        Raises:
            RunFolderError: No draw is trained in so late a step, so the weights would hold draws that the ledger calls
                pending, and they would be trained twice.
        """
        with self._file.transaction() as connection:
            (last_step,) = connection.execute(
                "SELECT COALESCE(MAX(step), 0) FROM draws WHERE state = 'trained'"
            ).fetchone()
            if from_step > last_step:
                raise RunFolderError(
                    f"the run cannot go on from step {from_step}, since the last step in its ledger is {last_step}; "
                    "resume from that step or an earlier one"
                )
            connection.execute(
                "UPDATE attempts SET state = 'stored' WHERE state = 'used' "
                "AND key IN (SELECT key FROM draws WHERE state = 'trained' AND step > ?)",
                (from_step,),
            )
            connection.execute(
                "UPDATE draws SET state = 'pending', reason = NULL, step = NULL, trained_version = NULL, lag = NULL "
                "WHERE step > ?",
                (from_step,),
            )
            connection.execute("UPDATE attempts SET state = 'dropped', reason = ? WHERE state = 'pending'", (LOST,))
            ((number,),) = connection.execute(
                "INSERT INTO incarnations SELECT COALESCE(MAX(number) + 1, 0), ?, ? FROM incarnations RETURNING number",
                (from_step, reason),
            ).fetchall()
        return int(number)

    @property
    def incarnation(self) -> int | None:
        """Number of the current incarnation, or None before the first."""
        with self._file.naming_faults():
            (number,) = self._file.connection.execute("SELECT MAX(number) FROM incarnations").fetchone()
        return None if number is None else int(number)

    def incarnations(self) -> tuple[Incarnation, ...]:
        """All incarnations, in order."""
        with self._file.naming_faults():
            rows = self._file.connection.execute(
                "SELECT number, from_step, reason FROM incarnations ORDER BY number"
            ).fetchall()
        return tuple(Incarnation(number=number, from_step=step, reason=reason) for number, step, reason in rows)

    # --- draws ------------------------------------------------------------------------------------------------------

    def admit(self, draw: Draw, *, version: int) -> None:
        """Take a draw into the ledger as pending.

        Args:
            draw: The draw; its key must be new.
            version: Newest routable weight version now; lag counts from it.

        Raises:
            RunFolderError: The draw was admitted before.
        """
        with self._file.transaction() as connection:
            added = connection.execute(
                "INSERT INTO draws (key, epoch, draw_index, task_id, seed, state, admitted_version) "
                "VALUES (?, ?, ?, ?, ?, 'pending', ?) ON CONFLICT DO NOTHING",
                (draw.key, draw.epoch, draw.index, draw.task_id, draw.seed, version),
            )
            if added.rowcount != 1:
                raise RunFolderError(f"draw {draw.key} was admitted before, and a draw is admitted once")
            self._file.count("drawn")

    def readmit(self, key: str, *, version: int) -> None:
        """Let a pending draw take a slot again, to be rolled out anew: its lag counts from ``version`` now.

        Raises:
            RunFolderError: The draw is not pending.
        """
        with self._file.transaction() as connection:
            changed = connection.execute(
                "UPDATE draws SET admitted_version = ? WHERE key = ? AND state = 'pending'", (version, key)
            )
            if changed.rowcount != 1:
                raise RunFolderError(f"draw {key} cannot take a slot again, since it {self._standing(key)}")

    def mark_trained(self, keys: Iterable[str], *, step: int, version: int) -> None:
        """Pending to trained, and each draw's stored attempt to used, for all of a step's draws or for none.

        Args:
            keys: Keys of the draws.
            step: The training step, from 1.
            version: Weight version that they were trained on (before the update).

        Raises:
            RunFolderError: One of them is not pending or has no stored attempt, or the step lies before the
                incarnation's first.
        """
        with self._file.transaction() as connection:
            for key in keys:
                self._leave_pending(
                    key,
                    "state = 'trained', trained_version = ?1, lag = ?1 - admitted_version",
                    value=version,
                    step=step,
                    becoming="trained",
                )
                used = connection.execute(
                    "UPDATE attempts SET state = 'used' WHERE key = ? AND state = 'stored'", (key,)
                )
                if used.rowcount != 1:
                    raise RunFolderError(f"draw {key} cannot become trained, since it has no stored attempt")

    def mark_dropped(self, key: str, *, reason: str, step: int) -> None:
        """Pending to dropped, and its pending and stored attempts with it, for the same reason.

        Args:
            key: Key of the draw.
            reason: Why.
            step: The training step, from 1, that was being collected or trained.

        Raises:
            RunFolderError: The draw is not pending, or the step lies before the incarnation's first.
        """
        with self._file.transaction() as connection:
            self._leave_pending(key, "state = 'dropped', reason = ?1", value=reason, step=step, becoming="dropped")
            connection.execute(
                "UPDATE attempts SET state = 'dropped', reason = ? WHERE key = ? AND state IN ('pending', 'stored')",
                (reason, key),
            )

    def pending(self) -> tuple[PendingDraw, ...]:
        """The pending draws in the order of epoch and index, each with its stored result where there is one.

        Raises:
            CodecError: A stored result was written by another version of Fourstroke.
        """
        with self._file.naming_faults():
            rows = self._file.connection.execute(
                "SELECT epoch, draw_index, task_id, seed, admitted_version, "
                "(SELECT COALESCE(MAX(attempt) + 1, 0) FROM attempts WHERE key = draws.key "
                "AND incarnation = (SELECT MAX(number) FROM incarnations)), "
                "(SELECT record FROM attempts JOIN results USING (key, incarnation, attempt) "
                "WHERE key = draws.key AND state = 'stored') "
                "FROM draws WHERE state = 'pending' ORDER BY epoch, draw_index"
            ).fetchall()
        return tuple(
            PendingDraw(
                draw=Draw(epoch=epoch, index=index, task_id=task_id, seed=seed),
                admitted_version=version,
                next_attempt=next_attempt,
                stored=None if record is None else decode(record, GroupRecord),
            )
            for epoch, index, task_id, seed, version, next_attempt, record in rows
        )

    def cursor(self) -> tuple[int, int] | None:
        """Epoch and index of the last draw admitted, or None if nothing was."""
        with self._file.naming_faults():
            rows = self._file.connection.execute(
                "SELECT epoch, draw_index FROM draws ORDER BY epoch DESC, draw_index DESC LIMIT 1"
            ).fetchall()
        return (rows[0][0], rows[0][1]) if rows else None

    # --- attempts ---------------------------------------------------------------------------------------------------

    def begin_attempt(self, key: str, *, incarnation: int, attempt: int, version: int, num_episodes: int) -> None:
        """Write down that a draw is being rolled out.

        Args:
            key: Key of the draw.
            incarnation: The current one.
            attempt: Number of the attempt; new in this incarnation.
            version: Version of the weights at the draw's admission.
            num_episodes: Episodes that the result must have.

        Raises:
            RunFolderError: The draw is not pending or has a stored attempt, the incarnation is not the current one, or
                the attempt was begun before.
        """
        with self._file.transaction() as connection:
            added = connection.execute(
                "INSERT INTO attempts (key, incarnation, attempt, state, admitted_version, num_episodes) "
                "SELECT key, ?, ?, 'pending', ?, ? FROM draws WHERE key = ? AND state = 'pending' "
                "AND ? = (SELECT MAX(number) FROM incarnations) "
                "AND NOT EXISTS (SELECT 1 FROM attempts WHERE key = draws.key AND state = 'stored') "
                "ON CONFLICT DO NOTHING",
                (incarnation, attempt, version, num_episodes, key, incarnation),
            )
            if added.rowcount != 1:
                why = self._why_no_attempt(key, incarnation=incarnation)
                raise RunFolderError(f"attempt {attempt} of draw {key} cannot begin, since {why}")
            self._file.count("attempts")

    def receive(self, record: GroupRecord) -> bool:
        """Take the result of an attempt: pending to stored. Its payload must be written already.

        A result that comes twice, or of an attempt that was given up, of an earlier incarnation, of a draw that is
        settled or has another stored attempt, changes nothing but the count of late ones.

        Returns:
            Whether the result was taken; if not, it is not to be trained.

        Raises:
            RunFolderError: It has not as many episodes as the attempt was to have.
        """
        attempt = (record.draw.key, record.incarnation, record.attempt)
        with self._file.transaction() as connection:
            taken = connection.execute(
                "UPDATE attempts SET state = 'stored' WHERE key = ? AND incarnation = ? AND attempt = ? "
                "AND state = 'pending' AND incarnation = (SELECT MAX(number) FROM incarnations) "
                "AND EXISTS (SELECT 1 FROM draws WHERE key = attempts.key AND state = 'pending') "
                "AND NOT EXISTS (SELECT 1 FROM attempts AS other WHERE other.key = attempts.key "
                "AND other.state = 'stored') RETURNING num_episodes",
                attempt,
            ).fetchall()
            if not taken:
                self._file.count("late")
                return False
            num_episodes = taken[0][0]
            if len(record.episodes) != num_episodes:
                raise RunFolderError(
                    f"attempt {record.attempt} of draw {record.id} was to have {num_episodes} episodes and its result "
                    f"has {len(record.episodes)}"
                )
            at = record.reference
            connection.execute(
                "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*attempt, at.segment, at.offset, at.length, at.digest, encode(record)),
            )
        return True

    def drop_attempt(self, key: str, *, incarnation: int, attempt: int, reason: str) -> None:
        """Give up an attempt, pending or stored; its draw stays pending, and may be tried again.

        Raises:
            RunFolderError: The attempt was never begun, or is used or dropped.
        """
        with self._file.transaction() as connection:
            dropped = connection.execute(
                "UPDATE attempts SET state = 'dropped', reason = ? WHERE key = ? AND incarnation = ? AND attempt = ? "
                "AND state IN ('pending', 'stored')",
                (reason, key, incarnation, attempt),
            )
            if dropped.rowcount != 1:
                row = connection.execute(
                    "SELECT state FROM attempts WHERE key = ? AND incarnation = ? AND attempt = ?",
                    (key, incarnation, attempt),
                ).fetchone()
                standing = "was never begun" if row is None else f"is {row[0]}"
                raise RunFolderError(
                    f"attempt {attempt} of draw {key} in incarnation {incarnation} cannot be dropped, since it "
                    f"{standing}"
                )

    def references(self) -> dict[str, PayloadReference]:
        """Where the group of each draw lies that has a stored or used attempt, by key, in the order of keys."""
        with self._file.naming_faults():
            rows = self._file.connection.execute(
                'SELECT key, segment, "offset", length, digest FROM attempts '
                "JOIN results USING (key, incarnation, attempt) WHERE state IN ('stored', 'used') ORDER BY key"
            ).fetchall()
        return {
            key: PayloadReference(segment=segment, offset=offset, length=length, digest=digest)
            for key, segment, offset, length, digest in rows
        }

    # --- the balance ------------------------------------------------------------------------------------------------

    def audit(self) -> Audit:
        """The balances now, of one instant even while another process writes. Counts every row."""
        with self._file.transaction(kind="DEFERRED") as connection:
            drawn, begun, late = (self._file.meta(name) for name in ("drawn", "attempts", "late"))
            (num_incarnations,) = connection.execute("SELECT COUNT(*) FROM incarnations").fetchone()
            draw_rows = connection.execute(
                "SELECT state, reason, lag, COUNT(*) FROM draws GROUP BY state, reason, lag"
            ).fetchall()
            attempt_rows = connection.execute(
                "SELECT state, reason, COUNT(*) FROM attempts GROUP BY reason, state"
            ).fetchall()
        draws, draws_by_reason = _tally((state, reason, count) for state, reason, _, count in draw_rows)
        attempts, attempts_by_reason = _tally(attempt_rows)
        lags = {lag: count for state, _, lag, count in draw_rows if state == "trained"}
        has_all_rows = drawn == draws.total() and begun == attempts.total()
        return Audit(
            drawn=drawn,
            trained=draws["trained"],
            dropped=draws["dropped"],
            pending=draws["pending"],
            balanced=has_all_rows and attempts["used"] == draws["trained"],
            dropped_by_reason=draws_by_reason,
            attempts=begun,
            attempts_used=attempts["used"],
            attempts_dropped=attempts["dropped"],
            attempts_pending=attempts["pending"] + attempts["stored"],
            attempts_dropped_by_reason=attempts_by_reason,
            late=late,
            lags=lags,
            max_lag=max(lags, default=0),
            incarnations=num_incarnations,
        )

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()

    # --- guards -----------------------------------------------------------------------------------------------------

    def _leave_pending(self, key: str, assignments: str, *, value: int | str, step: int, becoming: str) -> None:
        connection = self._file.connection
        changed = connection.execute(
            f"UPDATE draws SET {assignments}, step = ?2 "  # noqa: S608 - text of our own
            f"WHERE key = ?3 AND state = 'pending' AND ?2 > {_FROM_STEP}",
            (value, step, key),
        )
        if changed.rowcount == 1:
            return
        why = f"it {self._standing(key)}"
        if why == "it is pending":
            (from_step,) = connection.execute(f"SELECT {_FROM_STEP}").fetchone()
            why = f"this incarnation resumed from step {from_step}"
        raise RunFolderError(f"draw {key} cannot become {becoming} in step {step}, since {why}")

    def _standing(self, key: str) -> str:
        row = self._file.connection.execute("SELECT state FROM draws WHERE key = ?", (key,)).fetchone()
        return "was never admitted" if row is None else f"is {row[0]}"

    def _why_no_attempt(self, key: str, *, incarnation: int) -> str:
        standing = self._standing(key)
        if standing != "is pending":
            return f"the draw {standing}"
        current = self.incarnation
        if incarnation != current:
            return f"it is of incarnation {incarnation} and the current one is {current}"
        stored = self._file.connection.execute(
            "SELECT 1 FROM attempts WHERE key = ? AND state = 'stored'", (key,)
        ).fetchone()
        return "the draw has a stored attempt" if stored else "it was begun before"


def _tally(rows: Iterable[tuple[str, str | None, int]]) -> tuple[Counter[str], dict[str, int]]:
    """Counts by state, and those of the dropped by reason, of rows (state, reason, count)."""
    by_state: Counter[str] = Counter()
    by_reason: dict[str, int] = {}
    for state, reason, count in rows:
        by_state[state] += count
        if reason is not None:
            by_reason[reason] = count
    return by_state, by_reason
