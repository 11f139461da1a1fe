"""Where a run, or a later incarnation of it, begins: what the ledger says, and which stored groups still count.

A stored group is used again if it has enough scores (the run may have ended between its receipt and that look), the
weights that it was sampled under are part of the resumed history, and its lag cannot pass the bound: at position i of
the new order it is trained by step (i + W - 1) // P at the latest (see ``slots``). All others are rolled again with the
same seeds. Pure, but for the questions to the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourstroke.config import RunConfig
from fourstroke.store import Ledger
from fourstroke.types import Draw, GroupRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PastDraw:
    """A draw that an earlier incarnation admitted and that is not trained: rolled again, or used as it is stored."""

    draw: Draw
    stored: GroupRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """Where the controller begins.

    Attributes:
        incarnation: Number of this incarnation.
        step: The last step that is done, which is also the number of the weights.
        past_draws: Draws to take up again, in their order.
        cursor: Epoch and index of the last draw ever admitted; None if there is none.
    """

    incarnation: int
    step: int
    past_draws: tuple[PastDraw, ...]
    cursor: tuple[int, int] | None


def restore(ledger: Ledger, config: RunConfig, *, step: int, reason: str) -> StartingPoint:
    """Open the next incarnation at a step whose checkpoint is whole (0: at the very beginning).

    Groups that are stored but not used again are dropped in the ledger's balance of attempts.
    """
    incarnation = ledger.open_incarnation(from_step=step, reason=reason)
    past = []
    for position, pending in enumerate(ledger.pending()):
        stored = pending.stored
        unfit = stored and why_not(stored, position=position, version=step, config=config)
        if stored and unfit:
            ledger.drop_attempt(pending.draw.key, incarnation=stored.incarnation, attempt=stored.attempt, reason=unfit)
        past.append(PastDraw(draw=pending.draw, stored=None if unfit else stored))
    return StartingPoint(incarnation=incarnation, step=step, past_draws=tuple(past), cursor=ledger.cursor())


def why_not(group: GroupRecord, *, position: int, version: int, config: RunConfig) -> str:
    """Why a stored group cannot be used again, as a reason for the ledger; empty if it can.

    Args:
        group: A group of an earlier incarnation.
        position: Its place, from 0, in the order of the draws that are taken up again.
        version: Version that the run resumes at.
        config: Gives P, S and W, and whether the run must repeat bit for bit.
    """
    rollout = config.rollout
    if config.deterministic:
        return "rolled_again"
    if len(group.scored) < rollout.min_scored:
        return "too_few_scored"
    if group.admitted_version > version or any(number > version for number in _versions(group)):
        return "superseded"
    trained_at = version + (position + rollout.window - 1) // rollout.groups_per_step
    return "stale" if trained_at - group.admitted_version > rollout.staleness else ""


def _versions(group: GroupRecord) -> Iterator[int]:
    for episode in group.episodes:
        for run in episode.versions:
            yield run.version
