"""Rollouts outside the ledger (evaluation): what a dead part lost is rolled again, with the same seeds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fourstroke.errors import ActorDiedError, EngineDiedError
from fourstroke.rollout import WorkerPool
from fourstroke.types import Assignment, GroupRecord, RefusedGroup


class RetryingRollouts:
    """Runs assignments on a pool; satisfies what ``evaluation`` asks of rollouts.

    Args:
        workers: The pool.
        max_attempts: Tries of each call.
    """

    def __init__(self, workers: WorkerPool, *, max_attempts: int) -> None:
        self._workers = workers
        self._max_attempts = max_attempts

    async def run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        """Sample, grade and store groups.

        Raises:
            EngineDiedError: Engines died at every try.
            ActorDiedError: Workers died at every try.
        """
        for attempt in range(self._max_attempts):
            tried = [msgspec.structs.replace(assignment, attempt=attempt) for assignment in assignments]
            try:
                return await self._workers.run(tried, is_together=is_together)
            except (EngineDiedError, ActorDiedError):
                if attempt == self._max_attempts - 1:
                    raise
        raise AssertionError(self._max_attempts)
