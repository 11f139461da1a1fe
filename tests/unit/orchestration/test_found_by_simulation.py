"""Faults of the control plane that simulated runs found, each in the smallest setting that shows it."""

from fourstroke.config import load_config
from fourstroke.orchestration.restore import restore
from fourstroke.store import Ledger
from fourstroke.types import (
    Draw,
    EpisodeRecord,
    GroupRecord,
    PayloadReference,
    RowShape,
    Scored,
    StopReason,
    Unscored,
    VersionRun,
)

DRAW = Draw(epoch=0, index=0, task_id="a", seed=7)


def _record(*, num_scored):
    verdicts = [
        Scored(score=float(member), components={}, reason="", grader="g@0", cost_s=0.0)
        if member < num_scored
        else Unscored(reason="timeout", detail="", grader="g@0", cost_s=0.0)
        for member in range(2)
    ]
    return GroupRecord(
        draw=DRAW,
        admitted_version=0,
        incarnation=0,
        attempt=0,
        episodes=tuple(
            EpisodeRecord(
                member=member,
                stop=StopReason.FINISHED,
                verdict=verdict,
                num_sampled_tokens=1,
                versions=(VersionRun(version=0, num_tokens=1),),
                rows=(RowShape(num_tokens=2, num_loss_tokens=1),),
                failure="",
            )
            for member, verdict in enumerate(verdicts)
        ),
        reference=PayloadReference(segment=0, offset=0, length=1, digest="0" * 16),
    )


def _restored(folder, *, num_scored):
    """A run that was killed right after the receipt of a group, and resumed."""
    ledger = Ledger(folder / "ledger.sqlite")
    config = load_config({"rollout": {"group_size": 2, "min_scored": 2}})
    ledger.open_incarnation(from_step=0, reason="start")
    ledger.admit(DRAW, version=0)
    ledger.begin_attempt(DRAW.key, incarnation=0, attempt=0, version=0, num_episodes=2)
    assert ledger.receive(_record(num_scored=num_scored))
    start = restore(ledger, config, step=0, reason="killed")
    audit = ledger.audit()
    ledger.close()
    return start.past_draws, audit


def test_a_stored_group_with_too_few_scores_is_rolled_again(tmp_path):
    (past,), audit = _restored(tmp_path, num_scored=1)

    assert past.stored is None
    assert audit.attempts_dropped_by_reason == {"too_few_scored": 1}
    assert audit.balanced


def test_a_stored_group_with_enough_scores_is_used_again(tmp_path):
    (past,), audit = _restored(tmp_path, num_scored=2)

    assert past.stored == _record(num_scored=2)
    assert audit.attempts_dropped == 0
