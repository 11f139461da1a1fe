"""The ledger under any moves, resumes and crashes, against a model in plain Python; and under real kills.

A crash is a copy of the files at some instant within a move, as a kill there would leave them; the life goes on from
the copy.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fourstroke.errors import RunFolderError
from fourstroke.store import Audit, Ledger, PendingDraw, read_payload
from fourstroke.types import Draw, GroupRecord, Message, PayloadReference

REASONS = ("stale", "too_few_scored")


def _draw(index: int) -> Draw:
    return Draw(epoch=0, index=index, task_id=f"t{index}", seed=index)


def _record(index: int, incarnation: int, attempt: int) -> GroupRecord:
    return GroupRecord(
        draw=_draw(index),
        admitted_version=0,
        incarnation=incarnation,
        attempt=attempt,
        episodes=(),
        reference=PayloadReference(segment=incarnation, offset=index, length=attempt, digest="f" * 16),
    )


def _copy(path: Path, folder: Path) -> Path:
    """The ledger's files as a kill at this instant would leave them."""
    folder.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        if (source := path.with_name(name)).exists():
            shutil.copy(source, folder / name)
    return folder / path.name


class Model:
    """What the ledger should hold, by index of the draw and by (index, incarnation, attempt)."""

    def __init__(self) -> None:
        self.draws: dict[int, dict[str, Any]] = {}
        self.attempts: dict[tuple[int, int, int], str] = {}  # pending, stored, used, or the reason of a drop
        self.from_steps: list[int] = []
        self.step = 0  # the last trained
        self.late = 0
        # What the weights of today went through: (step, index), kept apart from the states above.
        self.timeline: list[tuple[int, int]] = []

    @property
    def incarnation(self) -> int:
        return len(self.from_steps) - 1

    def state(self, index: int) -> str:
        return self.draws[index]["state"] if index in self.draws else "unknown"

    def attempts_of(self, index: int, *states: str) -> list[tuple[int, int, int]]:
        return [name for name, state in self.attempts.items() if name[0] == index and state in states]

    def open_incarnation(self, from_step: int) -> None:
        self.from_steps.append(from_step)
        self.step = from_step
        self.timeline = [(step, index) for step, index in self.timeline if step <= from_step]
        for index, draw in self.draws.items():
            if draw["state"] != "pending" and draw["step"] > from_step:
                draw["state"] = "pending"
                for name in self.attempts_of(index, "used"):
                    self.attempts[name] = "stored"
        for name, state in self.attempts.items():
            if state == "pending":
                self.attempts[name] = "lost"

    def train(self, indices: list[int], version: int) -> None:
        self.step += 1
        for index in indices:
            self.draws[index].update(state="trained", step=self.step, lag=version - self.draws[index]["version"])
            (name,) = self.attempts_of(index, "stored")
            self.attempts[name] = "used"
            assert index not in [trained for _, trained in self.timeline], "trained twice"
            self.timeline.append((self.step, index))

    def drop(self, index: int, reason: str, step: int) -> None:
        self.draws[index].update(state="dropped", step=step, reason=reason)
        for name in self.attempts_of(index, "pending", "stored"):
            self.attempts[name] = reason

    def audit(self) -> Audit:
        states = Counter(draw["state"] for draw in self.draws.values())
        reasons = Counter(draw["reason"] for draw in self.draws.values() if draw["state"] == "dropped")
        lags = Counter(draw["lag"] for draw in self.draws.values() if draw["state"] == "trained")
        attempts = Counter(self.attempts.values())
        attempt_reasons = {name: n for name, n in attempts.items() if name not in ("pending", "stored", "used")}
        return Audit(
            drawn=len(self.draws),
            trained=states["trained"],
            dropped=states["dropped"],
            pending=states["pending"],
            balanced=True,
            dropped_by_reason=dict(reasons),
            attempts=len(self.attempts),
            attempts_used=attempts["used"],
            attempts_dropped=sum(attempt_reasons.values()),
            attempts_pending=attempts["pending"] + attempts["stored"],
            attempts_dropped_by_reason=attempt_reasons,
            late=self.late,
            lags=dict(lags),
            max_lag=max(lags, default=0),
            incarnations=len(self.from_steps),
        )

    def pending(self) -> tuple[PendingDraw, ...]:
        found = []
        for index in sorted(self.draws):
            if self.state(index) == "pending":
                stored = self.attempts_of(index, "stored")
                begun = [name[2] for name in self.attempts if name[:2] == (index, self.incarnation)]
                found.append(
                    PendingDraw(
                        draw=_draw(index),
                        admitted_version=self.draws[index]["version"],
                        next_attempt=max(begun, default=-1) + 1,
                        stored=_record(*stored[0]) if stored else None,
                    )
                )
        return tuple(found)


# Indices and attempts are few, so that many moves are illegal, double or late.
INDICES, ATTEMPTS, VERSIONS = st.integers(0, 2), st.integers(0, 1), st.integers(0, 5)
AGES = st.sampled_from((0, 0, 0, 1))  # incarnations ago


class LedgerMachine(RuleBasedStateMachine):
    """Moves on the ledger and on the model; each illegal one must be refused and change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self._num_copies = 0
        self._crash_after: int | None = None
        self._path = Path(self._folder.name, "ledger.sqlite")
        self.ledger, self.model = Ledger(self._path), Model()
        self.ledger.open_incarnation(from_step=0, reason="start")
        self.model.open_incarnation(0)

    def teardown(self) -> None:
        self.ledger.close()
        self._folder.cleanup()

    def _move(self, call: Callable[[], object], change: Callable[[], object] | None) -> None:
        """Make a move, legal if it has a ``change`` to make on the model; or crash in the midst of it."""
        copies = self._arm()
        if change is None:
            with pytest.raises(RunFolderError):
                call()
        else:
            call()
        self.ledger._file.connection.set_progress_handler(None, 0)
        self._crash_after = None
        is_done = True
        if copies:
            self.ledger.close()
            ((self._path, is_done),) = copies
            self.ledger = Ledger(self._path)
        if change is not None and is_done:
            change()

    def _arm(self) -> list[tuple[Path, bool]]:
        """Copy the files once SQLite has gone some way into the next move.

        The list then holds the copy's path, and whether the move's transaction was over by then.
        """
        copies: list[tuple[Path, bool]] = []
        if self._crash_after is None:
            return copies
        connection, ticks_left, has_begun = self.ledger._file.connection, self._crash_after, False

        def tick() -> int:
            nonlocal ticks_left, has_begun
            ticks_left -= 1
            has_begun |= connection.in_transaction
            if ticks_left < 0 and not copies:
                self._num_copies += 1
                copy = _copy(self._path, Path(self._folder.name, str(self._num_copies)))
                copies.append((copy, has_begun and not connection.in_transaction))
            return 0

        connection.set_progress_handler(tick, 1)
        return copies

    @rule(ticks=st.integers(0, 300))
    def crash_in_the_next_move(self, ticks: int) -> None:
        self._crash_after = ticks

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self._path)

    @rule(from_step=st.integers(0, 6))
    def open_incarnation(self, from_step: int) -> None:
        last_step = max((step for step, _ in self.model.timeline), default=0)
        self._move(
            lambda: self.ledger.open_incarnation(from_step=from_step, reason="resume"),
            (lambda: self.model.open_incarnation(from_step)) if from_step <= last_step else None,
        )

    @rule(index=INDICES, version=VERSIONS)
    def admit(self, index: int, version: int) -> None:
        def change() -> None:
            self.model.draws[index] = {"state": "pending", "version": version}

        is_legal = index not in self.model.draws
        self._move(lambda: self.ledger.admit(_draw(index), version=version), change if is_legal else None)

    @rule(index=INDICES, version=VERSIONS)
    def readmit(self, index: int, version: int) -> None:
        is_legal = self.model.state(index) == "pending"
        self._move(
            lambda: self.ledger.readmit(_draw(index).key, version=version),
            (lambda: self.model.draws[index].update(version=version)) if is_legal else None,
        )

    @rule(index=INDICES, age=AGES, attempt=ATTEMPTS)
    def begin_attempt(self, index: int, age: int, attempt: int) -> None:
        model = self.model
        incarnation = model.incarnation - age
        name = (index, incarnation, attempt)
        is_legal = (
            model.state(index) == "pending"
            and age == 0
            and name not in model.attempts
            and not model.attempts_of(index, "stored")
        )
        self._move(
            lambda: self.ledger.begin_attempt(
                _draw(index).key, incarnation=incarnation, attempt=attempt, version=0, num_episodes=0
            ),
            (lambda: model.attempts.update({name: "pending"})) if is_legal else None,
        )

    @rule(index=INDICES, age=AGES, attempt=ATTEMPTS)
    def receive(self, index: int, age: int, attempt: int) -> None:
        model = self.model
        name = (index, model.incarnation - age, attempt)
        is_taken = (
            age == 0
            and model.attempts.get(name) == "pending"
            and model.state(index) == "pending"
            and not model.attempts_of(index, "stored")
        )

        def change() -> None:
            assert taken == [is_taken]
            if is_taken:
                model.attempts[name] = "stored"
            else:
                model.late += 1

        taken: list[bool] = []
        self._move(lambda: taken.append(self.ledger.receive(_record(*name))), change)

    @rule(index=INDICES, age=AGES, attempt=ATTEMPTS, reason=st.sampled_from(REASONS))
    def drop_attempt(self, index: int, age: int, attempt: int, reason: str) -> None:
        name = (index, self.model.incarnation - age, attempt)
        is_legal = self.model.attempts.get(name) in ("pending", "stored")
        self._move(
            lambda: self.ledger.drop_attempt(_draw(index).key, incarnation=name[1], attempt=attempt, reason=reason),
            (lambda: self.model.attempts.update({name: reason})) if is_legal else None,
        )

    @rule(indices=st.lists(INDICES, min_size=1, max_size=3), version=VERSIONS)
    def mark_trained(self, indices: list[int], version: int) -> None:
        model = self.model
        is_legal = len(set(indices)) == len(indices) and all(
            model.state(index) == "pending" and model.attempts_of(index, "stored") for index in indices
        )
        keys = [_draw(index).key for index in indices]
        self._move(
            lambda: self.ledger.mark_trained(keys, step=model.step + 1, version=version),
            (lambda: model.train(indices, version)) if is_legal else None,
        )

    @rule(index=INDICES)
    def store(self, index: int) -> None:
        """As much of a draw's way to a stored attempt as it still has before it."""
        if self.model.state(index) == "unknown":
            self.admit(index, version=0)
        if self.model.state(index) == "pending" and not self.model.attempts_of(index, "stored"):
            for attempt in range(2):
                if (index, self.model.incarnation, attempt) not in self.model.attempts:
                    self.begin_attempt(index, age=0, attempt=attempt)
            self.receive(index, age=0, attempt=0)

    @rule(version=VERSIONS)
    def train_all(self, version: int) -> None:
        if stored := [index for index in self.model.draws if self.model.attempts_of(index, "stored")]:
            keys = [_draw(index).key for index in stored]
            step = self.model.step + 1
            self._move(
                lambda: self.ledger.mark_trained(keys, step=step, version=version),
                lambda: self.model.train(stored, version),
            )

    @rule(index=INDICES, reason=st.sampled_from(REASONS), ahead=st.integers(0, 2))
    def mark_dropped(self, index: int, reason: str, ahead: int) -> None:
        step = self.model.from_steps[-1] + ahead
        is_legal = self.model.state(index) == "pending" and ahead > 0
        self._move(
            lambda: self.ledger.mark_dropped(_draw(index).key, reason=reason, step=step),
            (lambda: self.model.drop(index, reason, step)) if is_legal else None,
        )

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.ledger.audit() == self.model.audit()
        assert self.ledger.pending() == self.model.pending()
        assert self.ledger.incarnation == self.model.incarnation
        assert self.ledger.cursor() == ((0, max(self.model.draws)) if self.model.draws else None)
        trained = self.ledger._file.connection.execute("SELECT step, draw_index FROM draws WHERE state = 'trained'")
        assert sorted(trained) == sorted(self.model.timeline)
        kept = [name for name, state in self.model.attempts.items() if state in ("stored", "used")]
        assert self.ledger.references() == {_draw(name[0]).key: _record(*name).reference for name in kept}


LedgerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


_KEY = _draw(0).key
# Each is legal after those before it.
MOVES: dict[str, Callable[[Ledger], object]] = {
    "open_incarnation": lambda ledger: ledger.open_incarnation(from_step=0, reason="start"),
    "admit": lambda ledger: ledger.admit(_draw(0), version=0),
    "readmit": lambda ledger: ledger.readmit(_KEY, version=1),
    "begin_attempt": lambda ledger: ledger.begin_attempt(_KEY, incarnation=0, attempt=0, version=1, num_episodes=0),
    "receive": lambda ledger: ledger.receive(_record(0, 0, 0)),
    "receive_late": lambda ledger: ledger.receive(_record(0, 0, 0)),
    "mark_trained": lambda ledger: ledger.mark_trained([_KEY], step=1, version=1),
    "resume": lambda ledger: ledger.open_incarnation(from_step=0, reason="resume"),
    "drop_attempt": lambda ledger: ledger.drop_attempt(_KEY, incarnation=0, attempt=0, reason="stale"),
    "mark_dropped": lambda ledger: ledger.mark_dropped(_KEY, reason="stale", step=1),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_kill_at_any_instant_of_a_move_leaves_all_of_it_or_nothing(tmp_path: Path, name: str) -> None:
    path, copies, num_ticks = tmp_path / "ledger.sqlite", list[Path](), 0
    with closing(Ledger(path)) as ledger:
        for earlier in list(MOVES)[: list(MOVES).index(name)]:
            MOVES[earlier](ledger)
        before = (ledger.audit(), ledger.pending())

        def tick() -> int:
            nonlocal num_ticks
            num_ticks += 1
            if num_ticks % 7 == 0:
                copies.append(_copy(path, tmp_path / str(num_ticks)))
            return 0

        ledger._file.connection.set_progress_handler(tick, 1)
        MOVES[name](ledger)
        ledger._file.connection.set_progress_handler(None, 0)
        after = (ledger.audit(), ledger.pending())

    assert len(copies) > 5
    for copy in copies:
        with closing(Ledger(copy, is_read_only=True)) as left:
            assert (left.audit(), left.pending()) in (before, after)


_WRITER = """
import sys
from pathlib import Path
from fourstroke.store import Ledger, PayloadWriter
from fourstroke.types import Draw, GroupRecord, Message

folder, from_step = Path(sys.argv[1]), int(sys.argv[2])
ledger, payload = Ledger(folder / "ledger.sqlite"), PayloadWriter(folder, segment_bytes=10_000)
incarnation = ledger.open_incarnation(from_step=from_step, reason="test")

def pending():
    yield from ((p.draw, p.next_attempt, p.stored) for p in ledger.pending())
    for index in range((ledger.cursor() or (0, -1))[1] + 1, 10**6):
        draw = Draw(epoch=0, index=index, task_id="t", seed=index)
        ledger.admit(draw, version=index)
        yield draw, 0, None

step = from_step + 1
for draw, attempt, stored in pending():
    if stored is None:
        ledger.begin_attempt(draw.key, incarnation=incarnation, attempt=attempt, version=0, num_episodes=0)
        reference = payload.append(Message(role="assistant", content=draw.key * 20))
        record = GroupRecord(
            draw=draw, admitted_version=0, incarnation=incarnation, attempt=attempt, episodes=(), reference=reference
        )
        assert ledger.receive(record)
        assert not ledger.receive(record)
    if draw.index % 3 == 0:
        ledger.mark_dropped(draw.key, reason="stale", step=step)
    elif draw.index % 3 == 1:
        ledger.mark_trained([draw.key], step=step, version=step - 1)
        print(step, flush=True)
        step += 1
"""


def test_killed_writers_leave_a_balanced_ledger_and_whole_payload(tmp_path: Path) -> None:
    path, from_step = tmp_path / "ledger.sqlite", 0
    settled: dict[str, int] = {}
    for incarnation, num_lines in enumerate((30, 60, 90)):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(from_step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
            assert run.stdout is not None
            seen = [int(run.stdout.readline()) for _ in range(num_lines)][-1]
            os.kill(run.pid, signal.SIGKILL)
            assert run.wait() == -signal.SIGKILL
        with closing(Ledger(path, is_read_only=True)) as ledger:  # as `ledger audit` looks at it
            audit = ledger.audit()
            assert audit.balanced
            assert audit.trained >= seen
            assert audit.incarnations == incarnation + 1
            rows = ledger._file.connection.execute("SELECT key, step FROM draws WHERE state = 'trained'").fetchall()
            references = ledger.references()
        assert settled.items() <= dict(rows).items()  # trained up to the checkpoint: never again
        assert sorted(step for _, step in rows) == list(range(1, audit.trained + 1))
        for key, reference in references.items():
            assert read_payload(tmp_path, reference, Message).content == key * 20
        from_step = seen - 10
        settled = {key: step for key, step in rows if step <= from_step}
