"""The index of episodes: what it finds, and that it follows a ledger that somebody else goes on writing."""

import contextlib
from pathlib import Path

import msgspec
import pytest

from fourstroke.errors import RunFolderError
from fourstroke.store import EpisodeFilter, EpisodeIndex, EpisodeOrder, Ledger, read_reference
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.types import PayloadReference, VersionRun


class Scene:
    """A ledger that is written, and an index of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = Ledger(path)
        self.ledger.open_incarnation(from_step=0, reason="test")
        self.index = EpisodeIndex(path)

    def receive(self, index, scores, *, lengths=None, incarnation=0, version=0, versions=None):
        group = make_group(scores, index=index, version=version, reply_lengths=lengths)
        reference = PayloadReference(segment=1, offset=index, length=2, digest="0" * 16)
        record = make_record(group, incarnation=incarnation, reference=reference)
        if versions:
            episodes = tuple(msgspec.structs.replace(episode, versions=versions) for episode in record.episodes)
            record = msgspec.structs.replace(record, episodes=episodes)
        self.ledger.admit(group.draw, version=version)
        self.ledger.begin_attempt(
            group.id, incarnation=incarnation, attempt=0, version=version, num_episodes=len(scores)
        )
        assert self.ledger.receive(record)
        return group.id

    def found(self, order=EpisodeOrder.OLDEST, **chosen):
        page = self.index.page(EpisodeFilter(**chosen), order=order)
        assert page.num_matches == len(page.rows)
        return [(row.key[-1], row.member) for row in page.rows]


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "ledger.sqlite")
    with contextlib.closing(made.ledger), contextlib.closing(made.index):
        yield made


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, [("0", 0), ("0", 1), ("1", 0), ("1", 1)]),
        ({"verdict": "unscored"}, [("0", 1)]),
        ({"min_score": 0.5}, [("0", 0), ("1", 1)]),
        ({"max_score": 0.25}, [("1", 0)]),
        ({"min_score": 0.25, "max_score": 0.25}, [("1", 0)]),
        ({"min_tokens": 5}, [("1", 0), ("1", 1)]),
        ({"max_tokens": 4, "verdict": "scored"}, [("0", 0)]),
        ({"state": "used"}, [("0", 0), ("0", 1)]),
        ({"state": "stored"}, [("1", 0), ("1", 1)]),
        ({"step": 3}, [("0", 0), ("0", 1)]),
        ({"step": 4}, []),
        ({"task": "task-1"}, [("1", 0), ("1", 1)]),
        ({"task": "ask-1"}, []),
        ({"group": "e0000-i000001"}, [("1", 0), ("1", 1)]),
        ({"stop": "finished", "reason": "error"}, [("0", 1)]),
        ({"stop": "length"}, []),
        ({"task": "%"}, []),
        ({"reason": "' OR 1=1 --"}, []),
    ],
)
def test_a_filter_finds_what_it_names(scene, chosen, expected):
    first = scene.receive(0, [1.0, None], lengths=[4, 2])
    scene.receive(1, [0.25, 0.75], lengths=[5, 9])
    scene.ledger.mark_trained([first], step=3, version=2)

    assert scene.found(**chosen) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (EpisodeOrder.OLDEST, [("0", 0), ("0", 1), ("1", 0)]),
        (EpisodeOrder.NEWEST, [("1", 0), ("0", 0), ("0", 1)]),
        (EpisodeOrder.LOWEST_SCORE, [("1", 0), ("0", 0), ("0", 1)]),
        (EpisodeOrder.HIGHEST_SCORE, [("0", 0), ("1", 0), ("0", 1)]),
        (EpisodeOrder.LONGEST, [("0", 1), ("1", 0), ("0", 0)]),
        (EpisodeOrder.SHORTEST, [("0", 0), ("1", 0), ("0", 1)]),
    ],
)
def test_the_order_holds_and_what_has_no_score_comes_last(scene, order, expected):
    scene.receive(0, [1.0, None], lengths=[2, 8])
    scene.receive(1, [0.5], lengths=[4])

    assert scene.found(order) == expected


def test_a_page_holds_a_part_and_counts_all(scene):
    for index in range(5):
        scene.receive(index, [0.0, 1.0])

    page = scene.index.page(EpisodeFilter(verdict="scored"), order=EpisodeOrder.OLDEST, offset=3, limit=4)

    assert page.num_matches == 10
    assert [(row.key[-1], row.member) for row in page.rows] == [("1", 1), ("2", 0), ("2", 1), ("3", 0)]


def test_what_is_written_later_is_found_and_states_follow(scene):
    first = scene.receive(0, [1.0])
    assert scene.found(state="stored") == [("0", 0)]

    scene.ledger.mark_trained([first], step=1, version=0)
    scene.receive(1, [0.0])

    assert scene.found(state="used", step=1) == [("0", 0)]
    assert scene.found(state="stored") == [("1", 0)]


def test_a_resume_takes_back_what_its_checkpoint_does_not_hold(scene):
    early, late = scene.receive(0, [1.0]), scene.receive(1, [1.0])
    scene.ledger.mark_trained([early], step=1, version=0)
    scene.ledger.mark_trained([late], step=2, version=1)
    assert scene.found(state="used") == [("0", 0), ("1", 0)]

    scene.ledger.open_incarnation(from_step=1, reason="resumed")

    assert scene.found(state="used") == [("0", 0)]
    assert scene.found(state="stored") == [("1", 0)]
    assert scene.index.page(EpisodeFilter(state="stored")).rows[0].step is None


def test_a_dropped_draw_says_why(scene):
    key = scene.receive(0, [1.0])
    scene.ledger.mark_dropped(key, reason="stale", step=1)

    (row,) = scene.index.page(EpisodeFilter(state="dropped")).rows

    assert (row.dropped_for, row.step, row.trained_version) == ("stale", None, None)


def test_another_ledger_at_the_same_place_is_read_anew(scene, tmp_path):
    scene.receive(0, [1.0])
    scene.receive(1, [1.0])
    assert len(scene.found()) == 2
    scene.ledger.close()
    for file in tmp_path.iterdir():
        file.unlink()

    second = Scene(scene.path)
    second.receive(0, [0.0])

    assert scene.found() == [("0", 0)]
    assert scene.index.page(EpisodeFilter()).rows[0].score == 0.0
    second.ledger.close()


def test_scores_lengths_and_lags_count_what_was_trained(scene):
    first = scene.receive(0, [1.0, None, 0.0], lengths=[4, 2, 4], version=1)
    second = scene.receive(1, [0.5], lengths=[3], version=2)
    scene.receive(2, [0.5], lengths=[7])
    scene.ledger.mark_trained([first, second], step=1, version=3)

    assert scene.index.scores_by_step() == {1: [[1.0, 0.0], [0.5]]}
    assert scene.index.lengths() == [(2, "finished", 1), (3, "finished", 1), (4, "finished", 2), (7, "finished", 1)]
    assert scene.index.token_lags() == {1: 3, 2: 10}


def test_a_lag_is_that_of_each_token_and_not_of_its_draw(scene):
    runs = (VersionRun(version=1, num_tokens=5), VersionRun(version=3, num_tokens=2))
    key = scene.receive(0, [1.0, 0.0], version=1, versions=runs)
    scene.ledger.mark_trained([key], step=1, version=3)

    assert scene.index.token_lags() == {0: 4, 2: 10}
    (first, _) = scene.index.page(EpisodeFilter()).rows
    assert (first.oldest_version, first.newest_version, first.trained_version) == (1, 3, 3)


def test_members_come_in_order_and_a_reference_leads_to_the_payload(scene):
    key = scene.receive(7, [1.0, 0.0])

    members = scene.index.members(key, incarnation=0, attempt=0)

    assert [row.member for row in members] == [0, 1]
    assert scene.index.members(key, incarnation=1, attempt=0) == ()
    assert read_reference(scene.path, key, incarnation=0, attempt=0).offset == 7
    with pytest.raises(RunFolderError, match="has no result of draw e0000-i000007, incarnation 1, attempt 0"):
        read_reference(scene.path, key, incarnation=1, attempt=0)


def test_the_run_folder_stays_as_it_is(scene, tmp_path):
    scene.receive(0, [1.0])
    scene.ledger.close()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    assert scene.found() == [("0", 0)]

    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
