"""S17: the bound on staleness is exact at its limit, and a scheduler whose groups are all dropped at once goes on
(PrimeIntellect-ai/prime-rl#1901).

The report counts the updates that land between the start and the end of a rollout. Fourstroke's lag counts from a
group's admission to the weights that train it, so that it includes those updates; there is no other rule to keep or
drop a group. The report's numbers are held here for that lag: a group admitted at version 5.
"""

import pytest

from fourstroke.orchestration import restore
from fourstroke.testing.episodes import make_group, make_record

LIMITS = [(0, 5, True), (0, 6, False), (1, 6, True), (1, 7, False), (2, 7, True), (2, 8, False)]


@pytest.mark.parametrize(("bound", "trained_at", "is_kept"), LIMITS)
def test_a_resumed_run_uses_a_stored_group_up_to_the_bound(configure, bound, trained_at, is_kept):
    record = make_record(make_group([1.0, 0.0], version=5))

    reason = restore.why_not(record, position=0, version=trained_at, config=configure(staleness=bound))

    assert reason == ("" if is_kept else "stale")


@pytest.mark.parametrize(("bound", "trained_at", "is_kept"), LIMITS)
def test_the_check_at_the_batch_is_exact_and_what_it_drops_is_replaced(
    configure, leave, live, monkeypatch, bound, trained_at, is_kept
):
    """All groups in flight are stale at once, as if every other guard had failed."""
    monkeypatch.setattr(restore, "why_not", lambda *_, **__: "")
    past = leave(
        step=trained_at,
        trained=[make_group([1.0, 0.0], index=index, version=trained_at - 1) for index in range(2)],
        stored=[make_group([1.0, 0.0, 1.0, 0.0], index=2 + index, version=5) for index in range(2)],
    )
    config = configure(f"num_steps={trained_at + 2}", groups_per_step=2, staleness=bound)

    life = live(past, config)

    assert life.error is None
    assert life.steps == [trained_at + 1, trained_at + 2]
    assert life.audit.dropped_by_reason == ({} if is_kept else {"stale": 2})
    assert (life.audit.trained, life.audit.pending, life.audit.balanced) == (6, 0, True)
    assert life.audit.max_lag <= bound
    assert not is_kept or life.audit.max_lag == bound


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_the_level_never_passes_the_bound_when_a_step_starts(tmp_path, configure, live, bound):
    life = live(tmp_path, configure("num_steps=8", groups_per_step=2, staleness=bound))

    # Nothing but training takes time here, so that rollout runs ahead as far as it may.
    assert max(life.audit.lags) == bound
