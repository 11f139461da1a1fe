"""From an admitted draw to the record of a stored group, or to the reason why there is none.

    attempt 0 --------late-------------------------.
         '--> lost: attempt 1 --> too few scores: attempt 2 --> record
                                                   '--> a late result that comes first is taken as well

All attempts of a draw have its seed. Each result goes through the ledger, which takes one and turns all others down
(late, twice, of an earlier incarnation): what is lost is tried again, and nothing counts twice. Whether to try again
is the supervision policy's decision.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fourstroke.config import RunConfig
from fourstroke.errors import ActorDiedError, DeadlineError, EngineDiedError
from fourstroke.observability import EventKind, Waits
from fourstroke.orchestration.supervision import Action, Fault, FaultKind, Supervisor
from fourstroke.rollout import WorkerPool
from fourstroke.store import LOST, Ledger
from fourstroke.types import Assignment, Draw, GroupRecord, RefusedGroup, Task

# A result of a dead part says nothing of the group: these are tried again.
LOSSES = (EngineDiedError, ActorDiedError)

Tell = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A draw that gives no group."""

    reason: str


@dataclass(slots=True)
class Admitted:
    """A draw that holds a slot, and its attempts in this incarnation."""

    draw: Draw
    task: Task
    version: int
    attempts: Iterator[int] = field(default_factory=itertools.count)
    num_retries: int = 0


class Roller:
    """Rolls draws out, for one incarnation of a run.

    Args:
        config: Read for sizes, deadlines and retries.
        workers: Where groups are rolled.
        ledger: Where each attempt and each result is written down.
        supervisor: Decides on lost and late groups.
        incarnation: Number of the incarnation.
        waits: Where waits are noted.
        tell: Takes an event's kind and fields.
        on_record: Told of each result that the ledger took.
        step: The step that the run is at.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        workers: WorkerPool,
        ledger: Ledger,
        supervisor: Supervisor,
        incarnation: int,
        waits: Waits,
        tell: Tell,
        on_record: Callable[[GroupRecord], None],
    ) -> None:
        self._config = config
        self._workers = workers
        self._ledger = ledger
        self._supervisor = supervisor
        self._incarnation = incarnation
        self._waits = waits
        self._tell = tell
        self._on_record = on_record
        self.step = 0

    async def roll(self, admitted: Admitted) -> GroupRecord | Dropped:
        """Roll one draw. Late attempts go on beside their successors until one result has been taken.

        Raises:
            FourstrokeError: A fault that trying again does not mend.
        """
        running: dict[asyncio.Task[tuple[GroupRecord | RefusedGroup, ...]], Assignment] = {}
        try:
            while True:
                assignment = self._begin(admitted)
                running[asyncio.create_task(self._run([assignment], is_together=False))] = assignment
                outcome = await self._first_outcome(admitted, running)
                if outcome is not None:
                    return outcome
        finally:
            await self._give_up(admitted, running)

    async def roll_together(self, admitted: Sequence[Admitted]) -> dict[str, GroupRecord | Dropped]:
        """Roll draws as one batch that repeats bit for bit; what must be rolled again is again one batch."""
        outcomes: dict[str, GroupRecord | Dropped] = {}
        left = list(admitted)
        while left:
            assignments = [self._begin(one) for one in left]
            what = f"{len(left)} groups from {left[0].draw.key} on to be sampled and graded together"
            try:
                async with self._waits.within(self._config.deadlines.group_s, what):
                    results = await self._run(assignments, is_together=True)
            except (*LOSSES, DeadlineError) as error:
                for one, assignment in zip(left, assignments, strict=True):
                    lost = self._on_loss(one, assignment, error)
                    if lost is not None:
                        outcomes[one.draw.key] = lost
            else:
                for one, result in zip(left, results, strict=True):
                    outcome = self._on_result(one, result)
                    if outcome is not None:
                        outcomes[one.draw.key] = outcome
            left = [one for one in left if one.draw.key not in outcomes]
        return outcomes

    def _begin(self, admitted: Admitted) -> Assignment:
        """The next attempt, written down before it starts."""
        num_samples = self._config.rollout.group_size
        assignment = Assignment(
            draw=admitted.draw,
            task=admitted.task,
            num_samples=num_samples,
            admitted_version=admitted.version,
            incarnation=self._incarnation,
            attempt=next(admitted.attempts),
        )
        self._ledger.begin_attempt(
            admitted.draw.key,
            incarnation=self._incarnation,
            attempt=assignment.attempt,
            version=admitted.version,
            num_episodes=num_samples,
        )
        return assignment

    async def _run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        return await self._workers.run(assignments, is_together=is_together)

    async def _first_outcome(
        self,
        admitted: Admitted,
        running: dict[asyncio.Task[tuple[GroupRecord | RefusedGroup, ...]], Assignment],
    ) -> GroupRecord | Dropped | None:
        """Wait until an attempt gives an outcome; None where another attempt is to be begun."""
        deadline_s = self._config.deadlines.group_s
        name = max(running.values(), key=lambda assignment: assignment.attempt).name
        with self._waits.noted(f"group {name}, to be sampled and graded", deadline_s=deadline_s):
            done, _ = await asyncio.wait(running, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return self._on_late(admitted, name=name)
        for task in sorted(done, key=lambda task: running[task].attempt):
            assignment = running.pop(task)
            error = task.exception()
            if isinstance(error, LOSSES):
                outcome: GroupRecord | Dropped | None = self._on_loss(admitted, assignment, error)
            else:
                (result,) = task.result()
                outcome = self._on_result(admitted, result)
            if outcome is not None:
                return outcome
        return None

    def _on_late(self, admitted: Admitted, *, name: str) -> Dropped | None:
        fault = self._fault(FaultKind.GROUP_LATE, admitted, f"waited {self._config.deadlines.group_s:g} s for {name}")
        return Dropped("late") if self._supervisor.decide(fault) is Action.SHRINK else None

    def _on_loss(self, admitted: Admitted, assignment: Assignment, error: BaseException) -> Dropped | None:
        self._drop_attempt(admitted, assignment.attempt, reason=LOST)
        fault = self._fault(FaultKind.GROUP_LOST, admitted, str(error))
        return Dropped(LOST) if self._supervisor.decide(fault) is Action.SHRINK else None

    def _fault(self, kind: FaultKind, admitted: Admitted, reason: str) -> Fault:
        self._tell(EventKind.FAULT, fault=kind.value, group=admitted.draw.key, reason=reason)
        return Fault(kind=kind, subject=admitted.draw.key, step=self.step, num_others=0, reason=reason)

    def _on_result(self, admitted: Admitted, result: GroupRecord | RefusedGroup) -> GroupRecord | Dropped | None:
        key, rollout = admitted.draw.key, self._config.rollout
        if isinstance(result, RefusedGroup):
            self._tell(EventKind.TASK_REFUSED, group=key, task=admitted.task.id, reason=result.detail)
            return Dropped(result.reason)
        if not self._ledger.receive(result):
            self._tell(EventKind.RESULT_LATE, group=key, attempt=result.attempt)
            return None
        self._on_record(result)
        if len(result.scored) >= rollout.min_scored:
            return result
        if admitted.num_retries == rollout.max_retries:
            return Dropped("too_few_scored")
        admitted.num_retries += 1
        self._tell(EventKind.GROUP_RETRIED, group=key, num_scored=len(result.scored))
        self._drop_attempt(admitted, result.attempt, reason="too_few_scored")
        return None

    async def _give_up(
        self,
        admitted: Admitted,
        running: dict[asyncio.Task[tuple[GroupRecord | RefusedGroup, ...]], Assignment],
    ) -> None:
        """End the attempts that nobody waits for any more."""
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for assignment in running.values():
            self._drop_attempt(admitted, assignment.attempt, reason="overtaken")

    def _drop_attempt(self, admitted: Admitted, attempt: int, *, reason: str) -> None:
        self._ledger.drop_attempt(admitted.draw.key, incarnation=self._incarnation, attempt=attempt, reason=reason)
