"""What must hold of a simulated run: a ledger that is looked at after each transaction, and the checks of its folder.

    at each transaction    balanced
    at each step           the weights hold what the ledger calls trained, each row once; no lag passes the bound
    after each death       the newest checkpoint holds what the ledger calls trained up to its step
    at the end             draws are a prefix of the order, all are accounted for, none was passed over; every token
                           that was trained came of weights that are part of the history, at most S versions before

The checks know the rules and nothing of how the control plane keeps them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from fourstroke.config import RunConfig
from fourstroke.orchestration.draws import draw_order
from fourstroke.store import Ledger
from fourstroke.store.checkpoints import CHECKPOINT_MANIFEST, checkpoint_path, newest_checkpoint
from fourstroke.store.ledger_file import LedgerFile
from fourstroke.testing.network import Fate, FaultPlan, KilledError
from fourstroke.testing.simulated import digest_of
from fourstroke.types import Draw, GroupRecord, Task, WeightVersion, decode


class Witness:
    """What was seen of a run over all its lives, apart from what its ledger says.

    Attributes:
        incarnation: The present one; -1 before the first.
        truth: For each payload written, the weights of each member's tokens.
        records: Every result that came to a ledger.
        num_drops: Draws dropped, those that a resume took back too.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.incarnation = -1
        self.truth: dict[tuple[int, int], tuple[tuple[WeightVersion, ...], ...]] = {}
        self.records: list[GroupRecord] = []
        self.num_drops = 0
        self._num_segments = itertools.count()
        self._admitted: dict[str, int] = {}
        self._taken: set[str] = set()

    def next_segment(self) -> int:
        """Number of a new payload segment."""
        return next(self._num_segments)

    def on_incarnation(self) -> None:
        """Another incarnation begins."""
        self.incarnation += 1
        self._admitted, self._taken = {}, set()

    def on_admission(self, key: str) -> None:
        """A draw takes a slot in this incarnation."""
        self._admitted[key] = len(self._admitted)

    def on_drop(self, key: str) -> None:
        """A draw is dropped."""
        self.num_drops += 1
        self._taken.add(key)

    def on_step(self, keys: Sequence[str]) -> Iterator[str]:
        """A step has trained these; yields what was taken outside the window."""
        self._taken |= set(keys)
        oldest = min((number for key, number in self._admitted.items() if key not in self._taken), default=None)
        if oldest is not None:
            for key in keys:
                if self._admitted[key] >= oldest + self.config.rollout.window:
                    yield f"{key}, admission {self._admitted[key]}, overtook admission {oldest}"

    def faults_of_a_step(self, ledger: Ledger, trained: Sequence[Sequence[str]]) -> Iterator[str]:
        """What does not hold of the weights and the ledger right after a step.

        Args:
            ledger: The run's.
            trained: Ids of the rows that went into each update of the weights.
        """
        audit, staleness = ledger.audit(), self.config.rollout.staleness
        if audit.max_lag > staleness:
            yield f"lag {audit.max_lag} with staleness {staleness}"
        if "stale" in audit.dropped_by_reason:
            yield "the second check of the bound found something"
        rows = [row for update in trained for row in update]
        if len(rows) != len(set(rows)):
            yield f"rows trained twice: {sorted({row for row in rows if rows.count(row) > 1})}"
        if audit.trained != len(_groups(trained)):
            yield f"the ledger has {audit.trained} trained draws and the weights hold {len(_groups(trained))}"

    def content(self, folder: Path) -> str:
        """All rows of the ledger, for a trace."""
        with _reading(folder) as ledger:
            return "\n".join(repr(ledger.rows(query)) for query in _CONTENT)


_CONTENT = tuple(f"SELECT * FROM {name} ORDER BY 1, 2, 3" for name in ("incarnations", "draws", "attempts"))  # noqa: S608


class _ReadLedger(Ledger):
    """A ledger whose rows can be asked for."""

    def rows(self, query: str, *values: int) -> list[Any]:
        """The rows that a query gives."""
        return self._file.connection.execute(query, values).fetchall()


@contextmanager
def _reading(folder: Path) -> Iterator[_ReadLedger]:
    ledger = _ReadLedger(folder / "ledger.sqlite", is_read_only=True)
    try:
        yield ledger
    finally:
        ledger.close()


class _MortalFile(LedgerFile):
    """The file of a ledger whose driver may die before or after it commits.

    Attributes:
        is_mortal: Whether it may now.
    """

    def __init__(self, path: Path, *, plan: FaultPlan, die: Callable[[str], None], check: Callable[[], None]) -> None:
        self.is_mortal = False
        self._plan = plan
        self._die = die
        self._check = check
        super().__init__(path, is_read_only=False)
        self.is_mortal = True

    @contextmanager
    def transaction(self, *, kind: str = "IMMEDIATE") -> Iterator[Any]:
        is_writing = self.is_mortal and kind == "IMMEDIATE"
        fate = self._plan.fate_of_commit() if is_writing else Fate.FINE
        try:
            with super().transaction(kind=kind) as connection:
                yield connection
                if fate is Fate.DRIVER_DIES_BEFORE:
                    raise KilledError  # noqa: TRY301 - so that all is rolled back
        except KilledError:
            self._die("killed before a commit")
            raise
        if is_writing:
            self._check()
        if fate is Fate.DRIVER_DIES_AFTER:
            self._die("killed after a commit")
            raise KilledError


class SimulatedLedger(Ledger):
    """The real ledger of a driver that may die at each commit; looked at after each, and seen by a witness.

    Args:
        path: The file.
        witness: Told of what is written.
        plan: Decides at which commit the driver dies.
        kill_driver: Kills it.
        on_fault: Told of that.
        on_failure: Told of what does not hold.
    """

    def __init__(
        self,
        path: Path,
        *,
        witness: Witness,
        plan: FaultPlan,
        kill_driver: Callable[[], None],
        on_fault: Callable[[str], None],
        on_failure: Callable[[str], None],
    ) -> None:
        def die(how: str) -> None:
            on_fault(how)
            kill_driver()

        self._witness = witness
        self._on_failure = on_failure
        self._file: _MortalFile = _MortalFile(path, plan=plan, die=die, check=self._look)

    def open_incarnation(self, *, from_step: int, reason: str) -> int:
        """As the real one, seen by the witness."""
        self._witness.on_incarnation()
        return super().open_incarnation(from_step=from_step, reason=reason)

    def admit(self, draw: Draw, *, version: int) -> None:
        """As the real one, seen by the witness."""
        self._witness.on_admission(draw.key)
        super().admit(draw, version=version)

    def readmit(self, key: str, *, version: int) -> None:
        """As the real one, seen by the witness."""
        self._witness.on_admission(key)
        super().readmit(key, version=version)

    def mark_trained(self, keys: Iterable[str], *, step: int, version: int) -> None:
        """As the real one, seen by the witness."""
        keys = tuple(keys)
        for fault in self._witness.on_step(keys):
            self._on_failure(fault)
        super().mark_trained(keys, step=step, version=version)

    def mark_dropped(self, key: str, *, reason: str, step: int) -> None:
        """As the real one, seen by the witness."""
        self._witness.on_drop(key)
        super().mark_dropped(key, reason=reason, step=step)

    def receive(self, record: GroupRecord) -> bool:
        """As the real one, seen by the witness."""
        self._witness.records.append(record)
        return super().receive(record)

    def drop_attempt(self, key: str, *, incarnation: int, attempt: int, reason: str) -> None:
        """As the real one, seen by the witness."""
        # Attempts that end together end in no order that repeats, so that no fault may hang on it.
        self._file.is_mortal = False
        super().drop_attempt(key, incarnation=incarnation, attempt=attempt, reason=reason)
        self._file.is_mortal = True

    def is_pending(self, record: GroupRecord) -> bool:
        """Whether the attempt of a record is still waited for."""
        rows = self._file.connection.execute(
            "SELECT state FROM attempts WHERE key = ? AND incarnation = ? AND attempt = ?",
            (record.id, record.incarnation, record.attempt),
        ).fetchall()
        return rows == [("pending",)]

    def _look(self) -> None:
        if not self.audit().balanced:
            self._on_failure("the ledger is not balanced")


# --- the folder -----------------------------------------------------------------------------------------------------


def faults_of_the_folder(folder: Path, witness: Witness) -> Iterator[str]:
    """What does not hold of a run whose driver is gone."""
    del witness
    step = newest_checkpoint(folder / "checkpoints")
    with _reading(folder) as ledger:
        if not ledger.audit().balanced:
            yield "the ledger is not balanced"
        held = {key for (key,) in ledger.rows("SELECT key FROM draws WHERE state = 'trained' AND step <= ?", step)}
        (twice,) = ledger.rows("SELECT COUNT(*) - COUNT(DISTINCT key) FROM attempts WHERE state IN ('used', 'stored')")
    if step and (trained := _groups(_trained(folder, step))) != held:
        yield f"the checkpoint of step {step} and the ledger differ in {sorted(trained ^ held)}"
    if twice != (0,):
        yield f"{twice[0]} draws have two results"


def faults_of_a_finished_run(folder: Path, witness: Witness, tasks: Sequence[Task]) -> Iterator[str]:
    """What does not hold of a run that did its last step."""
    rollout, num_steps = witness.config.rollout, witness.config.num_steps
    trained = _trained(folder, num_steps)
    rows = [row for update in trained for row in update]
    with _reading(folder) as ledger:
        audit = ledger.audit()
        draws = ledger.rows("SELECT key, seed, task_id, state, step, lag FROM draws ORDER BY epoch, draw_index")
        used = ledger.rows(
            "SELECT record, step FROM attempts JOIN results USING (key, incarnation, attempt) "
            "JOIN draws USING (key) WHERE attempts.state = 'used'"
        )
        num_running = len(ledger.rows("SELECT 1 FROM attempts WHERE state = 'pending'"))
    expected = [
        (draw.key, draw.seed, draw.task_id)
        for draw, _ in itertools.islice(draw_order(tasks, seed=witness.config.seed), len(draws))
    ]
    if [row[:3] for row in draws] != expected:
        yield "the draws are no prefix of the order"
    by_step = [sum(state == "trained" and step == number for *_, state, step, _ in draws) for number in _to(num_steps)]
    if by_step != [rollout.groups_per_step] * num_steps:
        yield f"draws trained in each step: {by_step}"
    if len(rows) != len(set(rows)) or _groups(trained) != {row[0] for row in draws if row[3] == "trained"}:
        yield "the last weights do not hold each trained draw once"
    if num_running:
        yield f"{num_running} attempts are still waited for"
    if audit.pending > witness.num_drops:
        yield f"{audit.pending} draws are pending, and {witness.num_drops} were ever dropped"
    yield from _passed_over(draws, most=(rollout.window - 1) * audit.incarnations)
    for record, step in used:
        yield from _faults_of_a_group(decode(record, GroupRecord), witness, trained, version=step - 1)


def _passed_over(draws: Sequence[tuple[Any, ...]], *, most: int) -> Iterator[str]:
    """Draws that are pending while more later ones were trained than the window lets overtake."""
    num_later = 0
    for key, _, _, state, *_ in reversed(draws):
        num_later += state == "trained"
        if state == "pending" and num_later > most:
            yield f"{key} was passed over by {num_later} draws, which may be {most}"


def _faults_of_a_group(
    record: GroupRecord, witness: Witness, trained: Sequence[Sequence[str]], *, version: int
) -> Iterator[str]:
    """What does not hold of a group that was trained on a version: its lags, and the weights that it came of."""
    config = witness.config
    num_updates = config.algorithm.updates_per_step
    truth = witness.truth[record.reference.segment, record.reference.offset]
    if not version - config.rollout.staleness <= record.admitted_version <= version:
        yield f"{record.id} was admitted at {record.admitted_version} and trained on {version}"
    for episode, weights in zip(record.episodes, truth, strict=True):
        said = [run.version for run in episode.versions for _ in range(run.num_tokens)]
        if said != [held.number for held in weights]:
            yield f"{record.id} says that it came of {said} and came of {weights}"
        for held in weights:
            if not version - config.rollout.staleness <= held.number <= version:
                yield f"{record.id} has tokens of {held} and was trained on {version}"
            if held.digest not in ("checkpoint" * (held.number == 0), digest_of(trained[: held.number * num_updates])):
                yield f"{record.id} came of {held}, which is not part of the history"


def _trained(folder: Path, step: int) -> list[list[str]]:
    """Ids of the rows in each update of a checkpoint's weights."""
    file = checkpoint_path(folder / "checkpoints", step=step) / CHECKPOINT_MANIFEST
    trained: list[list[str]] = msgspec.json.decode(file.read_bytes())["trained"]
    return trained[:-1]


def _groups(trained: Sequence[Sequence[str]]) -> set[str]:
    return {row.partition(".")[0] for update in trained for row in update}


def _to(number: int) -> range:
    return range(1, number + 1)
