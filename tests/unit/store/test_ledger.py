"""The ledger's balance holds after any legal calls, illegal calls change nothing, and a kill loses nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourstroke.errors import RunFolderError
from fourstroke.store import Audit, Ledger, read_payload
from fourstroke.types import Draw, Message, PayloadReference

REFERENCE = PayloadReference(segment=1, offset=2, length=3, digest="f" * 16)


def _draw(index: int, *, epoch: int = 0) -> Draw:
    return Draw(epoch=epoch, index=index, task_id=f"t{index}", seed=2**62 + index)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as opened:
        yield opened


def test_life_of_four_draws(ledger: Ledger) -> None:
    for index in range(4):
        ledger.admit(_draw(index), version=0)
    ledger.store_group(_draw(1).key, REFERENCE, num_scored=7, num_members=8)
    ledger.mark_trained([_draw(1).key, _draw(0).key], step=0, version=0)
    ledger.mark_dropped(_draw(2).key, reason="too_few_scored")
    assert ledger.audit() == Audit(
        drawn=4, trained=2, dropped=1, pending=1, balanced=True, dropped_by_reason={"too_few_scored": 1}
    )
    assert ledger.references() == {_draw(1).key: REFERENCE}


def test_an_empty_ledger_balances(ledger: Ledger) -> None:
    assert ledger.audit() == Audit(drawn=0, trained=0, dropped=0, pending=0, balanced=True, dropped_by_reason={})


def test_illegal_moves_name_the_draw_and_change_nothing(ledger: Ledger) -> None:
    for index in range(3):
        ledger.admit(_draw(index), version=0)
    ledger.mark_trained([_draw(0).key], step=0, version=0)
    ledger.mark_dropped(_draw(1).key, reason="stale")
    before = ledger.audit()
    trained, dropped, unknown = _draw(0).key, _draw(1).key, _draw(9).key
    with pytest.raises(RunFolderError, match=f"draw {trained} was admitted before"):
        ledger.admit(_draw(0), version=1)
    for key, standing in ((trained, "is trained"), (dropped, "is dropped"), (unknown, "was never admitted")):
        with pytest.raises(RunFolderError, match=f"draw {key} cannot become trained, since it {standing}"):
            ledger.mark_trained([key], step=1, version=1)
        with pytest.raises(RunFolderError, match=f"draw {key} cannot become dropped, since it {standing}"):
            ledger.mark_dropped(key, reason="stale")
        with pytest.raises(RunFolderError, match=f"draw {key} takes no group, since it {standing}"):
            ledger.store_group(key, REFERENCE, num_scored=8, num_members=8)
    assert ledger.audit() == before


def test_a_step_is_trained_whole_or_not_at_all(ledger: Ledger) -> None:
    for index in range(3):
        ledger.admit(_draw(index), version=0)
    with pytest.raises(RunFolderError, match=f"draw {_draw(1).key} cannot become trained, since it is trained"):
        ledger.mark_trained([_draw(0).key, _draw(1).key, _draw(1).key, _draw(2).key], step=0, version=0)
    assert (ledger.audit().trained, ledger.audit().pending) == (0, 3)
    ledger.mark_trained([_draw(index).key for index in range(3)], step=0, version=0)
    assert ledger.audit().trained == 3


def test_a_group_is_stored_once(ledger: Ledger) -> None:
    ledger.admit(_draw(0), version=0)
    ledger.store_group(_draw(0).key, REFERENCE, num_scored=8, num_members=8)
    with pytest.raises(RunFolderError, match="has one already"):
        ledger.store_group(_draw(0).key, REFERENCE, num_scored=8, num_members=8)


@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM draws WHERE draw_index = 1", "UPDATE meta SET value = value - 1 WHERE name = 'drawn'"],
)
def test_a_lost_row_or_count_shows(tmp_path: Path, statement: str) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        for index in range(3):
            ledger.admit(_draw(index), version=0)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as raw:
        raw.execute(statement)
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        assert not ledger.audit().balanced


# Keys are few, so that most sequences try illegal moves too.
_MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 5)),
        st.tuples(st.just("train"), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
        st.tuples(st.just("drop"), st.integers(0, 5), st.sampled_from(["stale", "too_few_scored"])),
        st.tuples(st.just("reopen")),
    ),
    max_size=30,
)


def _apply(ledger: Ledger, states: dict[int, str], move: tuple) -> None:
    """Make one move on the ledger, and on a plain model that says whether it is legal."""
    match move:
        case ("admit", index):
            is_legal = index not in states
            changes = {index: "pending"}
            call = lambda: ledger.admit(_draw(index), version=0)  # noqa: E731
        case ("train", indices):
            is_legal = len(set(indices)) == len(indices) and all(states.get(i) == "pending" for i in indices)
            changes = dict.fromkeys(indices, "trained")
            call = lambda: ledger.mark_trained([_draw(i).key for i in indices], step=0, version=0)  # noqa: E731
        case ("drop", index, reason):
            is_legal = states.get(index) == "pending"
            changes = {index: reason}
            call = lambda: ledger.mark_dropped(_draw(index).key, reason=reason)  # noqa: E731
    if is_legal:
        call()
        states.update(changes)
    else:
        with pytest.raises(RunFolderError):
            call()


@settings(max_examples=60, deadline=None)
@given(moves=_MOVES)
def test_balance_under_any_moves(moves: list[tuple]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "ledger.sqlite")
        ledger, states = Ledger(path), dict[int, str]()
        for move in moves:
            if move[0] == "reopen":
                ledger.close()
                ledger = Ledger(path)
            else:
                _apply(ledger, states, move)
            audit, counts = ledger.audit(), Counter(states.values())
            reasons = {reason: counts[reason] for reason in ("stale", "too_few_scored") if counts[reason]}
            assert audit == Audit(
                drawn=len(states),
                trained=counts["trained"],
                dropped=sum(reasons.values()),
                pending=counts["pending"],
                balanced=True,
                dropped_by_reason=reasons,
            )
        ledger.close()


_WRITER = """
import sys
from pathlib import Path
from fourstroke.store import Ledger, PayloadWriter
from fourstroke.types import PayloadReference, Draw, Message

folder = Path(sys.argv[1])
ledger, payload = Ledger(folder / "ledger.sqlite"), PayloadWriter(folder, segment_bytes=10_000)
for index in range(int(sys.argv[2]), 10**6):
    draw = Draw(epoch=0, index=index, task_id="t", seed=index)
    ledger.admit(draw, version=index)
    reference = payload.append(Message(role="assistant", content=draw.key * 20))
    ledger.store_group(draw.key, reference, num_scored=8, num_members=8)
    if index % 3 == 0:
        ledger.mark_dropped(draw.key, reason="stale")
    elif index % 3 == 1:
        ledger.mark_trained([draw.key], step=index, version=index)
    if index % 50 == 0:
        print(index, flush=True)
"""


def test_killed_writers_leave_a_balanced_ledger_and_whole_payload(tmp_path: Path) -> None:
    path, start = tmp_path / "ledger.sqlite", 0
    for num_lines in (1, 2, 3):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
            assert run.stdout is not None
            seen = [int(run.stdout.readline()) for _ in range(num_lines)][-1]
            os.kill(run.pid, signal.SIGKILL)
            assert run.wait() == -signal.SIGKILL
        with closing(Ledger(path, is_read_only=True)) as ledger:  # as `ledger audit` looks at it
            audit = ledger.audit()
        assert audit.balanced
        assert audit.drawn > seen
        with closing(Ledger(path)) as ledger:
            assert ledger.audit() == audit
            references = ledger.references()
        assert audit.drawn - len(references) <= 3  # at most the draw in hand at each kill
        for key, reference in references.items():
            assert read_payload(tmp_path, reference, Message).content == key * 20
        start = audit.drawn


def test_a_reader_sees_a_live_ledger_and_cannot_change_it(ledger: Ledger, tmp_path: Path) -> None:
    ledger.admit(_draw(0), version=0)
    with closing(Ledger(tmp_path / "ledger.sqlite", is_read_only=True)) as reader:
        assert reader.audit().pending == 1
        ledger.admit(_draw(1), version=0)
        assert reader.audit().pending == 2
        with pytest.raises(RunFolderError, match="readonly"):
            reader.admit(_draw(2), version=0)


def test_a_reader_of_an_ended_run_leaves_nothing_beside_it(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.admit(_draw(0), version=0)
    before = sorted(path.name for path in tmp_path.iterdir())
    with closing(Ledger(tmp_path / "ledger.sqlite", is_read_only=True)) as reader:
        assert reader.audit().drawn == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before == ["ledger.sqlite"]


def test_a_missing_ledger_is_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is missing"):
        Ledger(tmp_path / "ledger.sqlite", is_read_only=True)
    assert not list(tmp_path.iterdir())
    (tmp_path / "ledger.sqlite").touch()  # killed before its first transaction
    with pytest.raises(RunFolderError, match="holds no ledger yet"):
        Ledger(tmp_path / "ledger.sqlite", is_read_only=True)


def test_newer_schema_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute("UPDATE meta SET value = 2 WHERE name = 'schema'")
    with pytest.raises(RunFolderError, match="has ledger schema 2 and this version of Fourstroke reads up to 1"):
        Ledger(path)
    path.write_bytes(b"no database at all, but long enough to be taken for one" * 20)
    for is_read_only in (False, True):
        with pytest.raises(RunFolderError, match="is damaged"):
            Ledger(path, is_read_only=is_read_only)


def test_a_full_disk_is_one_sentence_and_undoes_the_move(ledger: Ledger) -> None:
    raw = ledger._connection
    pages = raw.execute("PRAGMA page_count").fetchone()[0]
    raw.execute(f"PRAGMA max_page_count = {pages + 2}")

    def admit_many() -> None:
        for index in range(1000):
            ledger.admit(_draw(index), version=0)

    with pytest.raises(RunFolderError, match=r"ledger\.sqlite cannot be written, since its disk is full"):
        admit_many()
    assert ledger.audit().balanced
    raw.execute(f"PRAGMA max_page_count = {pages + 100}")
    ledger.admit(_draw(1000), version=0)
    assert ledger.audit().balanced


def test_another_thread_may_not_write(ledger: Ledger) -> None:
    faults: list[BaseException] = []

    def write() -> None:
        try:
            ledger.admit(_draw(0), version=0)
        except sqlite3.ProgrammingError as error:
            faults.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert len(faults) == 1
