"""A rollout worker: assignments in, graded and stored groups out; the caller keeps only their records.

    assignments -> runner (environments x engines -> episodes -> verdicts) -> payload segment -> GroupRecord

The payload is written before its record is returned, so every reference that anybody holds can be read. Knows nothing
of slots, of the ledger or of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fourstroke.engines.router import Router
from fourstroke.errors import DataError
from fourstroke.observability import Waits
from fourstroke.rollout.runner import GroupRunner
from fourstroke.store import PayloadWriter
from fourstroke.tokens import episode_rows, num_shared
from fourstroke.types import (
    Assignment,
    Column,
    Engine,
    EpisodeRecord,
    GradedEpisode,
    Group,
    GroupRecord,
    PayloadReference,
    RefusedGroup,
    RowShape,
    StopReason,
    VersionRun,
    Wait,
)


class RolloutWorker:
    """Satisfies ``types.Worker`` in the process that it lives in.

    Args:
        name: Name in logs.
        runner: Runs groups; samples through ``router``.
        router: Spreads its requests over the engines.
        payload: Where groups are written; its own segments.
        waits: What goes on here, shared with the runner.
    """

    def __init__(self, name: str, *, runner: GroupRunner, router: Router, payload: PayloadWriter, waits: Waits) -> None:
        self._name = name
        self._runner = runner
        self._router = router
        self._payload = payload
        self._waits = waits

    @property
    def name(self) -> str:
        """Name of this worker in logs."""
        return self._name

    async def start(self) -> None:
        """Start the graders."""
        await self._runner.start()

    async def route(self, engines: Sequence[Engine]) -> None:
        """From now on sample on these engines alone."""
        self._router.route(engines)

    async def run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        """Sample, grade and store the groups; answers in the order of the assignments.

        Raises:
            EngineDiedError: The engine died before it answered.
            RunFolderError: The disk is full.
        """
        outcomes = await self._runner.run(assignments, is_together=is_together)
        return tuple(
            outcome if isinstance(outcome, RefusedGroup) else self._stored(assignment, outcome)
            for assignment, outcome in zip(assignments, outcomes, strict=True)
        )

    async def check_health(self) -> tuple[Wait, ...]:
        """What goes on here now."""
        return self._waits.now()

    async def close(self) -> None:
        """End the graders and close the segment."""
        await self._runner.close()
        self._payload.close()

    def _stored(self, assignment: Assignment, group: Group) -> GroupRecord | RefusedGroup:
        """The record of a group, which is written first."""
        try:
            episodes = tuple(_records(group.members))
        except DataError as error:
            return RefusedGroup(key=group.id, reason="not_finite", detail=str(error))
        return GroupRecord(
            draw=group.draw,
            admitted_version=group.admitted_version,
            incarnation=assignment.incarnation,
            attempt=assignment.attempt,
            episodes=episodes,
            reference=self._write(group),
        )

    def _write(self, group: Group) -> PayloadReference:
        return self._payload.append(group)


def _records(members: Sequence[GradedEpisode]) -> Iterator[EpisodeRecord]:
    """Records of a group's episodes; each row says what it shares with the row before it."""
    before = np.zeros(0, dtype=np.int32)
    for member in members:
        episode = member.episode
        shapes = []
        for row in episode_rows(episode):
            ids = row[Column.IDS]
            shapes.append(
                RowShape(
                    num_tokens=row.num_tokens,
                    num_loss_tokens=row.num_loss_tokens,
                    num_shared_tokens=num_shared(before, ids),
                )
            )
            before = ids
        yield EpisodeRecord(
            member=episode.member,
            stop=episode.stop,
            verdict=member.verdict,
            num_sampled_tokens=episode.num_sampled_tokens,
            versions=tuple(_version_runs(member)),
            rows=tuple(shapes),
            failure=episode.messages[-1].content if episode.stop is StopReason.FAILED else "",
        )


def _version_runs(member: GradedEpisode) -> Iterator[VersionRun]:
    for span in member.episode.spans:
        yield from span.versions
