"""The ledger's moves, one by one: what each changes, what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from fourstroke.errors import CodecError, RunFolderError
from fourstroke.store import LOST, Audit, Incarnation, Ledger, PendingDraw
from fourstroke.types import (
    Draw,
    EpisodeRecord,
    GroupRecord,
    PayloadReference,
    RowShape,
    Scored,
    StopReason,
    VersionRun,
)

NUM_EPISODES = 2


def _draw(index: int, *, epoch: int = 0) -> Draw:
    return Draw(epoch=epoch, index=index, task_id=f"t{index}", seed=2**62 + index)


def _record(index: int, *, incarnation: int = 0, attempt: int = 0, num_episodes: int = NUM_EPISODES) -> GroupRecord:
    episodes = tuple(
        EpisodeRecord(
            member=member,
            stop=StopReason.FINISHED,
            verdict=Scored(score=0.5, components={}, reason="", grader="fake", cost_s=0.0),
            num_sampled_tokens=3,
            versions=(VersionRun(version=0, num_tokens=3),),
            rows=(RowShape(num_tokens=5, num_loss_tokens=3, num_shared_tokens=0),),
            failure="",
        )
        for member in range(num_episodes)
    )
    reference = PayloadReference(segment=incarnation, offset=100 * index + attempt, length=3, digest="f" * 16)
    return GroupRecord(
        draw=_draw(index),
        admitted_version=0,
        incarnation=incarnation,
        attempt=attempt,
        episodes=episodes,
        reference=reference,
    )


def _begin(ledger: Ledger, index: int, *, incarnation: int = 0, attempt: int = 0) -> None:
    ledger.begin_attempt(
        _draw(index).key, incarnation=incarnation, attempt=attempt, version=0, num_episodes=NUM_EPISODES
    )


def _store(ledger: Ledger, *indices: int, version: int = 0) -> None:
    """Admit draws and take a result of each, in incarnation 0."""
    for index in indices:
        ledger.admit(_draw(index), version=version)
        _begin(ledger, index)
        assert ledger.receive(_record(index))


def _stored(ledger: Ledger) -> dict[int, GroupRecord | None]:
    return {pending.draw.index: pending.stored for pending in ledger.pending()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with closing(Ledger(path)) as opened:
        opened.open_incarnation(from_step=0, reason="start")
        yield opened


def test_life_of_five_draws(ledger: Ledger) -> None:
    _store(ledger, 0, 1, 2, version=3)
    ledger.admit(_draw(3), version=4)  # nothing begun
    ledger.admit(_draw(4), version=4)
    _begin(ledger, 4)
    ledger.drop_attempt(_draw(4).key, incarnation=0, attempt=0, reason="timeout")
    _begin(ledger, 4, attempt=1)
    ledger.mark_trained([_draw(1).key, _draw(0).key], step=1, version=5)
    ledger.mark_dropped(_draw(2).key, reason="stale", step=2)

    assert ledger.audit() == Audit(
        drawn=5,
        trained=2,
        dropped=1,
        pending=2,
        balanced=True,
        dropped_by_reason={"stale": 1},
        attempts=5,
        attempts_used=2,
        attempts_dropped=2,
        attempts_pending=1,
        attempts_dropped_by_reason={"timeout": 1, "stale": 1},
        late=0,
        lags={2: 2},
        max_lag=2,
        incarnations=1,
    )
    assert ledger.references() == {_draw(index).key: _record(index).reference for index in (0, 1)}
    assert ledger.pending() == (
        PendingDraw(draw=_draw(3), admitted_version=4, next_attempt=0, stored=None),
        PendingDraw(draw=_draw(4), admitted_version=4, next_attempt=2, stored=None),
    )


def test_an_empty_ledger_balances(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        audit = ledger.audit()
        assert (audit.drawn, audit.attempts, audit.max_lag, audit.lags, audit.incarnations) == (0, 0, 0, {}, 0)
        assert audit.balanced
        assert (ledger.cursor(), ledger.incarnation, ledger.incarnations(), ledger.pending()) == (None, None, (), ())


def test_an_audit_becomes_json(ledger: Ledger) -> None:
    _store(ledger, 0)
    ledger.mark_trained([_draw(0).key], step=1, version=2)
    assert json.loads(json.dumps(msgspec.to_builtins(ledger.audit())))["lags"] == {"2": 1}


def test_a_resume_undoes_what_came_after_its_checkpoint(ledger: Ledger) -> None:
    _store(ledger, *range(6))
    ledger.mark_trained([_draw(0).key], step=1, version=0)
    ledger.mark_dropped(_draw(1).key, reason="stale", step=1)
    ledger.mark_trained([_draw(2).key], step=2, version=1)
    ledger.mark_dropped(_draw(3).key, reason="stale", step=2)
    ledger.admit(_draw(6), version=2)
    _begin(ledger, 6)

    assert ledger.open_incarnation(from_step=1, reason="killed") == 1

    assert ledger.incarnation == 1
    assert ledger.incarnations() == (
        Incarnation(number=0, from_step=0, reason="start"),
        Incarnation(number=1, from_step=1, reason="killed"),
    )
    # 0 and 1 stand; 2 is stored again; the episodes of 3 stay dropped; 4 and 5 were stored; 6 was under way.
    assert _stored(ledger) == {2: _record(2), 3: None, 4: _record(4), 5: _record(5), 6: None}
    audit = ledger.audit()
    assert (audit.drawn, audit.trained, audit.dropped, audit.pending) == (7, 1, 1, 5)
    assert (audit.attempts, audit.attempts_used, audit.attempts_dropped, audit.attempts_pending) == (7, 1, 3, 3)
    assert audit.attempts_dropped_by_reason == {"stale": 2, LOST: 1}
    assert audit.balanced
    assert audit.incarnations == 2

    # The life goes on: a stored result is used again, or dropped and rolled out anew.
    ledger.drop_attempt(_draw(4).key, incarnation=0, attempt=0, reason="stale")
    ledger.readmit(_draw(4).key, version=1)
    _begin(ledger, 4, incarnation=1)
    assert ledger.receive(_record(4, incarnation=1))
    ledger.mark_trained([_draw(2).key, _draw(4).key], step=2, version=1)
    assert ledger.audit().lags == {0: 2, 1: 1}
    assert ledger.audit().balanced


def test_a_resume_from_the_last_step_keeps_all_that_is_settled(ledger: Ledger) -> None:
    _store(ledger, 0, 1)
    ledger.mark_trained([_draw(0).key], step=1, version=0)
    before = ledger.audit()
    ledger.open_incarnation(from_step=1, reason="resume")
    assert ledger.audit() == msgspec.structs.replace(before, incarnations=2)


def test_a_resume_from_a_step_that_the_ledger_does_not_hold_is_refused(ledger: Ledger) -> None:
    _store(ledger, 0)
    ledger.mark_trained([_draw(0).key], step=1, version=0)
    with pytest.raises(RunFolderError, match="cannot go on from step 2, since the last step in its ledger is 1"):
        ledger.open_incarnation(from_step=2, reason="resume")
    ledger.open_incarnation(from_step=0, reason="resume")
    # The checkpoint of step 1 holds draw 0, which is pending again.
    with pytest.raises(RunFolderError, match="cannot go on from step 1, since the last step in its ledger is 0"):
        ledger.open_incarnation(from_step=1, reason="resume")
    assert ledger.incarnation == 1


def test_a_step_before_the_incarnation_is_refused(ledger: Ledger) -> None:
    _store(ledger, 0, 1)
    ledger.mark_trained([_draw(0).key], step=3, version=0)
    ledger.open_incarnation(from_step=3, reason="resume")
    key = _draw(1).key
    with pytest.raises(RunFolderError, match=f"draw {key} cannot become trained in step 3, since .* from step 3"):
        ledger.mark_trained([key], step=3, version=2)
    with pytest.raises(RunFolderError, match=f"draw {key} cannot become dropped in step 2, since .* from step 3"):
        ledger.mark_dropped(key, reason="stale", step=2)
    ledger.mark_trained([key], step=4, version=3)


def test_illegal_moves_name_the_draw_and_change_nothing(ledger: Ledger) -> None:
    _store(ledger, 0, 1, 2)
    ledger.mark_trained([_draw(0).key], step=1, version=0)
    ledger.mark_dropped(_draw(1).key, reason="stale", step=1)
    ledger.admit(_draw(3), version=0)
    before = ledger.audit()
    with pytest.raises(RunFolderError, match=f"draw {_draw(0).key} was admitted before"):
        ledger.admit(_draw(0), version=1)
    for index, standing in ((0, "is trained"), (1, "is dropped"), (9, "was never admitted")):
        key = _draw(index).key
        with pytest.raises(RunFolderError, match=f"draw {key} cannot become trained in step 2, since it {standing}"):
            ledger.mark_trained([key], step=2, version=1)
        with pytest.raises(RunFolderError, match=f"draw {key} cannot become dropped in step 2, since it {standing}"):
            ledger.mark_dropped(key, reason="stale", step=2)
        with pytest.raises(RunFolderError, match=f"draw {key} cannot take a slot again, since it {standing}"):
            ledger.readmit(key, version=1)
        with pytest.raises(RunFolderError, match=f"attempt 1 of draw {key} cannot begin, since the draw {standing}"):
            _begin(ledger, index, attempt=1)
    with pytest.raises(RunFolderError, match=f"draw {_draw(3).key} cannot become trained, since it has no stored"):
        ledger.mark_trained([_draw(3).key], step=2, version=1)
    assert ledger.audit() == before


def test_an_attempt_begins_once_and_in_the_current_incarnation(ledger: Ledger) -> None:
    _store(ledger, 0)
    ledger.admit(_draw(1), version=0)
    _begin(ledger, 1)
    refused: tuple[tuple[int, int, int, str], ...] = (
        (0, 0, 1, "the draw has a stored attempt"),
        (1, 0, 0, "it was begun before"),
        (1, 1, 1, "it is of incarnation 1 and the current one is 0"),
    )
    for index, incarnation, attempt, why in refused:
        with pytest.raises(RunFolderError, match=f"attempt {attempt} of draw {_draw(index).key} .*, since {why}"):
            _begin(ledger, index, incarnation=incarnation, attempt=attempt)
    assert ledger.audit().attempts == 2


def test_no_attempt_begins_before_the_first_incarnation(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        ledger.admit(_draw(0), version=0)
        with pytest.raises(RunFolderError, match="it is of incarnation 0 and the current one is None"):
            _begin(ledger, 0)


def test_an_attempt_is_dropped_once_and_never_when_used(ledger: Ledger) -> None:
    _store(ledger, 0, 1)
    ledger.mark_trained([_draw(0).key], step=1, version=0)
    ledger.drop_attempt(_draw(1).key, incarnation=0, attempt=0, reason="too_few_scored")
    for index, attempt, standing in ((0, 0, "is used"), (1, 0, "is dropped"), (1, 1, "was never begun")):
        sentence = (
            f"attempt {attempt} of draw {_draw(index).key} in incarnation 0 cannot be dropped, since it {standing}"
        )
        with pytest.raises(RunFolderError, match=sentence):
            ledger.drop_attempt(_draw(index).key, incarnation=0, attempt=attempt, reason="x")
    assert ledger.audit().attempts_dropped_by_reason == {"too_few_scored": 1}


def _twice(ledger: Ledger) -> GroupRecord:
    _store(ledger, 0)
    return _record(0)


def _given_up(ledger: Ledger) -> GroupRecord:
    ledger.admit(_draw(0), version=0)
    _begin(ledger, 0)
    ledger.drop_attempt(_draw(0).key, incarnation=0, attempt=0, reason="timeout")
    return _record(0)


def _of_an_earlier_incarnation(ledger: Ledger) -> GroupRecord:
    ledger.admit(_draw(0), version=0)
    _begin(ledger, 0)
    ledger.open_incarnation(from_step=0, reason="resume")
    _begin(ledger, 0, incarnation=1)
    return _record(0)


def _of_a_trained_draw(ledger: Ledger) -> GroupRecord:
    ledger.admit(_draw(0), version=0)
    _begin(ledger, 0)
    _begin(ledger, 0, attempt=1)
    ledger.receive(_record(0, attempt=1))
    ledger.mark_trained([_draw(0).key], step=1, version=0)
    return _record(0)


def _of_a_dropped_draw(ledger: Ledger) -> GroupRecord:
    ledger.admit(_draw(0), version=0)
    _begin(ledger, 0)
    ledger.mark_dropped(_draw(0).key, reason="stale", step=1)
    return _record(0)


def _beside_another(ledger: Ledger) -> GroupRecord:
    ledger.admit(_draw(0), version=0)
    _begin(ledger, 0)
    _begin(ledger, 0, attempt=1)
    assert ledger.receive(_record(0, attempt=1))
    return _record(0)


def _unknown(ledger: Ledger) -> GroupRecord:
    return _record(7)


@pytest.mark.parametrize(
    "prepare",
    [
        _twice,
        _given_up,
        _of_an_earlier_incarnation,
        _of_a_trained_draw,
        _of_a_dropped_draw,
        _beside_another,
        _unknown,
    ],
)
def test_a_late_result_changes_nothing_but_its_count(ledger: Ledger, prepare: Callable[[Ledger], GroupRecord]) -> None:
    late = prepare(ledger)
    before, pending, references = ledger.audit(), ledger.pending(), ledger.references()
    assert not ledger.receive(late)
    assert not ledger.receive(late)
    assert ledger.audit() == msgspec.structs.replace(before, late=2)
    assert ledger.pending() == pending
    assert ledger.references() == references


def test_a_result_has_all_its_episodes(ledger: Ledger) -> None:
    ledger.admit(_draw(0), version=0)
    _begin(ledger, 0)
    sentence = f"attempt 0 of draw {_draw(0).key} was to have {NUM_EPISODES} episodes and its result has 1"
    with pytest.raises(RunFolderError, match=sentence):
        ledger.receive(_record(0, num_episodes=1))
    assert ledger.receive(_record(0))


def test_a_stored_result_of_another_version_is_refused(ledger: Ledger, path: Path) -> None:
    _store(ledger, 0)
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute("UPDATE results SET record = x'93ab47726f75705265636f726463c0'")  # ["GroupRecord", 99, nil]
    with pytest.raises(CodecError, match="GroupRecord has schema 99"):
        ledger.pending()


def test_a_step_is_trained_whole_or_not_at_all(ledger: Ledger) -> None:
    _store(ledger, 0, 1, 2)
    with pytest.raises(RunFolderError, match=f"draw {_draw(1).key} cannot become trained in step 1, since it is"):
        ledger.mark_trained([_draw(0).key, _draw(1).key, _draw(1).key, _draw(2).key], step=1, version=0)
    ledger.admit(_draw(3), version=0)
    with pytest.raises(RunFolderError, match=f"draw {_draw(3).key} .* no stored attempt"):
        ledger.mark_trained([_draw(0).key, _draw(3).key], step=1, version=0)
    assert (ledger.audit().trained, ledger.audit().pending, ledger.audit().attempts_used) == (0, 4, 0)
    ledger.mark_trained([_draw(index).key for index in range(3)], step=1, version=0)
    assert ledger.audit().trained == 3


def test_pending_draws_and_the_cursor_follow_epoch_and_index(ledger: Ledger) -> None:
    # As text, the key of index 1,000,000 comes before that of 999,999.
    for epoch, index in ((0, 999_999), (0, 1_000_000), (1, 0)):
        ledger.admit(_draw(index, epoch=epoch), version=0)
        assert ledger.cursor() == (epoch, index)
    assert [(p.draw.epoch, p.draw.index) for p in ledger.pending()] == [(0, 999_999), (0, 1_000_000), (1, 0)]
    ledger.mark_dropped(_draw(0, epoch=1).key, reason="stale", step=1)
    assert ledger.cursor() == (1, 0)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM draws WHERE draw_index = 1",
        "DELETE FROM attempts WHERE key LIKE '%1'",
        "UPDATE meta SET value = value - 1 WHERE name = 'drawn'",
        "UPDATE meta SET value = value + 1 WHERE name = 'attempts'",
        "UPDATE attempts SET state = 'stored' WHERE state = 'used'",
    ],
)
def test_a_lost_row_count_or_use_shows(path: Path, ledger: Ledger, statement: str) -> None:
    _store(ledger, 0, 1, 2)
    ledger.mark_trained([_draw(0).key], step=1, version=0)
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute(statement)
    assert not ledger.audit().balanced


def test_sqlite_itself_refuses_a_used_attempt_of_a_draw_that_is_not_trained(ledger: Ledger) -> None:
    _store(ledger, 0, 1)
    ledger.mark_trained([_draw(0).key], step=1, version=0)
    for statement in ("UPDATE attempts SET state = 'used'", "DELETE FROM draws WHERE draw_index = 0"):
        with pytest.raises(sqlite3.IntegrityError):
            ledger._file.connection.execute(statement)


def test_readers_see_a_live_ledger_and_cannot_change_it(ledger: Ledger, path: Path) -> None:
    ledger.admit(_draw(0), version=0)
    with (
        closing(Ledger(path, is_read_only=True)) as one,
        closing(Ledger(path, is_read_only=True)) as other,
    ):
        assert one.audit().pending == other.audit().pending == 1
        ledger.admit(_draw(1), version=0)
        assert one.audit().pending == other.audit().pending == 2
        with pytest.raises(RunFolderError, match="readonly"):
            one.admit(_draw(2), version=0)


def test_two_readers_never_see_half_a_move(ledger: Ledger, path: Path) -> None:
    has_ended, audits = threading.Event(), ([], [])
    has_begun = [threading.Event(), threading.Event()]

    def read(number: int) -> None:
        with closing(Ledger(path, is_read_only=True)) as reader:
            while not has_ended.is_set():
                audits[number].append(reader.audit())
                has_begun[number].set()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(begun.wait(60) for begun in has_begun)
        for step in range(1, 41):
            indices = range(4 * step, 4 * step + 4)
            _store(ledger, *indices)
            ledger.mark_trained([_draw(index).key for index in indices], step=step, version=0)
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()
    for seen in audits:
        assert all(audit.balanced and audit.trained % 4 == 0 for audit in seen)
        assert [audit.attempts for audit in seen] == sorted(audit.attempts for audit in seen)


def test_a_reader_of_an_ended_run_leaves_nothing_beside_it(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.admit(_draw(0), version=0)
    with closing(Ledger(tmp_path / "ledger.sqlite", is_read_only=True)) as reader:
        assert reader.audit().drawn == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.sqlite"]


def test_a_missing_ledger_is_not_made_by_reading(path: Path) -> None:
    with pytest.raises(RunFolderError, match="is missing"):
        Ledger(path, is_read_only=True)
    assert not list(path.parent.iterdir())
    path.touch()  # killed before its first transaction
    with pytest.raises(RunFolderError, match="holds no ledger yet"):
        Ledger(path, is_read_only=True)


@pytest.mark.parametrize("is_read_only", [False, True])
def test_other_schemas_and_foreign_files_are_refused(path: Path, *, is_read_only: bool) -> None:
    Ledger(path).close()
    for schema, sentence in (
        (3, "has ledger schema 3 and this version of Fourstroke reads up to 2; use a newer Fourstroke"),
        (1, "has ledger schema 1, made by an earlier version of Fourstroke; finish it with that one"),
    ):
        with closing(sqlite3.connect(path, isolation_level=None)) as raw:
            raw.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (schema,))
        with pytest.raises(RunFolderError, match=sentence):
            Ledger(path, is_read_only=is_read_only)
    path.write_bytes(b"no database at all, but long enough to be taken for one" * 20)
    with pytest.raises(RunFolderError, match="is damaged"):
        Ledger(path, is_read_only=is_read_only)


def test_a_ledger_of_the_first_schema_is_refused_before_it_is_touched(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID")
        raw.execute("INSERT INTO meta VALUES ('schema', 1), ('drawn', 0)")
        raw.execute("CREATE TABLE draws (key TEXT PRIMARY KEY)")
    with pytest.raises(RunFolderError, match="finish it with that one"):
        Ledger(path)
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1").fetchall() == [
            ("draws",),
            ("meta",),
        ]


def test_a_full_disk_is_one_sentence_and_undoes_the_move(ledger: Ledger) -> None:
    raw = ledger._file.connection
    pages = raw.execute("PRAGMA page_count").fetchone()[0]
    raw.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(RunFolderError, match=r"ledger\.sqlite cannot be written, since its disk is full"):
        _store(ledger, *range(1000))
    assert ledger.audit().balanced
    raw.execute(f"PRAGMA max_page_count = {pages + 100}")
    _store(ledger, 1000)
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
