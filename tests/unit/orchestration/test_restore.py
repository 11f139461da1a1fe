"""Where an incarnation begins, and which stored groups still count."""

import contextlib

import msgspec
import pytest

from fourstroke.config import load_config
from fourstroke.orchestration.restore import PastDraw, restore, why_not
from fourstroke.store import Ledger
from fourstroke.testing.episodes import make_group, make_record


def _config(*, staleness=2, window=1, deterministic=False):
    rollout = {"groups_per_step": 4, "staleness": staleness, "window": window}
    return load_config({"rollout": rollout, "deterministic": deterministic})


def _record(version, *, sampled=None):
    """Admitted at a version; sampled at it or at another."""
    record = make_record(make_group([1.0, 0.0], version=version if sampled is None else sampled))
    return msgspec.structs.replace(record, admitted_version=version)


@pytest.mark.parametrize(
    ("admitted", "position", "version", "window", "reason"),
    [
        # P = 4, S = 2: the groups at positions 0 to 3 are trained at the version itself.
        (5, 0, 5, 1, ""),
        (5, 0, 7, 1, ""),
        (5, 0, 8, 1, "stale"),
        # Those at 4 to 7 a version later.
        (5, 3, 7, 1, ""),
        (5, 4, 7, 1, "stale"),
        (5, 7, 6, 1, ""),
        (5, 8, 6, 1, "stale"),
        # Two may overtake with W = 3: position 2 may be trained as number 4.
        (5, 1, 7, 3, ""),
        (5, 2, 7, 3, "stale"),
        # Sampled under weights that the resumed history does not have.
        (6, 0, 5, 1, "superseded"),
    ],
)
def test_a_stored_group_is_used_while_its_lag_cannot_pass_the_bound(admitted, position, version, window, reason):
    config = _config(window=window)

    assert why_not(_record(admitted), position=position, version=version, config=config) == reason


def test_a_token_of_weights_that_are_gone_counts_too():
    assert why_not(_record(5, sampled=6), position=0, version=5, config=_config()) == "superseded"
    assert why_not(_record(5, sampled=6), position=0, version=6, config=_config()) == ""


def test_deterministic_runs_roll_all_again():
    config = _config(staleness=0, deterministic=True)

    assert why_not(_record(5), position=0, version=5, config=config) == "rolled_again"


def test_a_synchronous_run_uses_what_was_sampled_at_the_very_version():
    assert why_not(_record(5), position=3, version=5, config=_config(staleness=0)) == ""
    assert why_not(_record(4), position=0, version=5, config=_config(staleness=0)) == "stale"


# --- with the ledger ------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path):
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as opened:
        yield opened


def _store(ledger, index, *, version, is_finished=True):
    """Admit a draw and store its group; or leave its attempt unfinished."""
    record = make_record(make_group([1.0, 0.0], index=index, version=version))
    ledger.admit(record.draw, version=version)
    ledger.begin_attempt(record.id, incarnation=0, attempt=0, version=version, num_episodes=2)
    if is_finished:
        assert ledger.receive(record)
    return record


def test_a_run_begins_with_nothing(ledger):
    start = restore(ledger, _config(), step=0, reason="the run began")

    assert (start.incarnation, start.step, start.past_draws, start.cursor) == (0, 0, (), None)


def test_pending_draws_are_taken_up_in_order_with_the_groups_that_still_count(ledger):
    ledger.open_incarnation(from_step=0, reason="the run began")
    trained = [_store(ledger, index, version=0) for index in range(4)]
    ledger.mark_trained([record.id for record in trained], step=1, version=0)
    unfinished = _store(ledger, 4, version=0, is_finished=False)
    kept = _store(ledger, 5, version=1)
    future = _store(ledger, 6, version=2)  # sampled at a version whose checkpoint was never written

    start = restore(ledger, _config(), step=1, reason="resumed")

    assert (start.incarnation, start.step, start.cursor) == (1, 1, (0, 6))
    assert start.past_draws == (
        PastDraw(draw=unfinished.draw, stored=None),
        PastDraw(draw=kept.draw, stored=kept),
        PastDraw(draw=future.draw, stored=None),
    )
    audit = ledger.audit()
    assert audit.balanced
    assert audit.attempts_pending == 1  # the kept group
    assert audit.attempts_dropped_by_reason == {"lost": 1, "superseded": 1}
