"""The controller: four loops that turn tasks into trained weights.

    tasks --feed--> draws --roll out--> records --batch--> steps --train--> weights
                      ^                   |                                   |
                      |   dropped: slot back at once                          |
                      '------------ slots back when the weights landed <------'

    loop       produces                         waits for                        unblocked by
    --------   ------------------------------   ------------------------------   -------------------------------
    feed       draws: those of the past first   room in the queue of draws       roll out taking a draw
    roll out   records of stored groups         a free slot, then a draw         train (or a drop) freeing slots
    batch      P records, by the window         P finished groups of the window  roll out
    train      weights on the engines           a step's records                 batch

Only the train loop ends by itself. Any other loop that returns is a fault and is raised; a fifth task only looks
whether the trainer still lives. A step is P groups; its slots come back when its weights have landed, and ``slots``
proves that no group is then trained more than S versions after its admission.

The controller wires and drives; it decides nothing itself. Decisions are in ``slots``, ``buffer``, ``draws``,
``restore``, ``supervision``, ``batching``, ``trainer.packing`` and ``algorithms``. No part holds the controller, and
tokens never come here: a record is ids, lengths, verdicts, versions and a reference.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from fourstroke.algorithms import needs_gradient
from fourstroke.config import RunConfig
from fourstroke.engines.fleet import Fleet
from fourstroke.errors import (
    ActorDiedError,
    DataError,
    DeadlineError,
    MismatchError,
    PublicationError,
    TooManyDropsError,
)
from fourstroke.observability import EventKind, MetricBook, Waits
from fourstroke.observability.events import Event
from fourstroke.orchestration import measures
from fourstroke.orchestration.batching import build_batches
from fourstroke.orchestration.buffer import GroupBuffer
from fourstroke.orchestration.canary import CanaryWatch
from fourstroke.orchestration.draws import draw_order
from fourstroke.orchestration.faults import first_cause
from fourstroke.orchestration.restore import PastDraw, StartingPoint
from fourstroke.orchestration.rolling import Admitted, Dropped, Roller
from fourstroke.orchestration.slots import Slots
from fourstroke.orchestration.supervision import Supervisor
from fourstroke.rollout import WorkerPool
from fourstroke.store import Ledger
from fourstroke.trainer.packing import plan, shared_among
from fourstroke.types import BatchRecord, Draw, GroupRecord, Microbatch, Publication, StepStats, Task, Trainer, Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the controller drives."""

    fleet: Fleet
    canary: CanaryWatch
    trainer: Trainer
    workers: WorkerPool
    ledger: Ledger
    supervisor: Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Where the controller tells of what it did.

    Attributes:
        on_step: Takes a finished step's number and record.
        on_event: Takes an event.
        checkpoint_path: Folder of the checkpoint of a step.
        on_checkpoint: Takes the number of a step whose checkpoint is whole.
        origin_s: Time of the event loop from which events count.
    """

    on_step: Callable[[int, dict[str, float]], None]
    on_event: Callable[[Event], None]
    checkpoint_path: Callable[[int], Path]
    on_checkpoint: Callable[[int], None]
    origin_s: float


async def written(trainer: Trainer, step: int, *, canary: CanaryWatch, start: StartingPoint) -> Publication:
    """Have the trainer write the weights of a step, and say what an engine must make of them.

    Raises:
        PublicationError: It wrote those of another step.
    """
    publication = await trainer.publish(step, incarnation=start.incarnation)
    if publication.version.number != step:
        # An engine takes the version that it holds a second time, so that it would not find this.
        raise PublicationError(f"the trainer published version {publication.version} for step {step}")
    await canary.expect(trainer)
    return publication


class LoopEndedError(RuntimeError):
    """A loop that must not end returned."""


class Controller:
    """Drives one incarnation of a training run, from a step that is done to the last."""

    def __init__(
        self,
        config: RunConfig,
        *,
        tasks: Sequence[Task],
        parts: Parts,
        outlets: Outlets,
        start: StartingPoint,
    ) -> None:
        rollout = config.rollout
        self._config = config
        self._tasks = tasks
        self._parts = parts
        self._outlets = outlets
        self._start = start
        self._slots = Slots(groups_per_step=rollout.groups_per_step, staleness=rollout.staleness, window=rollout.window)
        self._slots_changed = asyncio.Condition()
        self._draws: asyncio.Queue[tuple[PastDraw, Task]] = asyncio.Queue(maxsize=rollout.groups_per_step)
        self._buffer = GroupBuffer(window=rollout.window)
        self._steps: asyncio.Queue[list[GroupRecord]] = asyncio.Queue(maxsize=1)
        self._waits = Waits("controller")
        self._roller = Roller(
            config,
            workers=parts.workers,
            ledger=parts.ledger,
            supervisor=parts.supervisor,
            incarnation=start.incarnation,
            waits=self._waits,
            tell=self._tell,
            on_record=self._on_record,
        )
        self._checkpointing: asyncio.Task[None] | None = None
        self._num_drops_in_a_row = 0
        # Groups that are still to be admitted; without this bound the last steps would draw what is never trained.
        self._num_wanted = (config.num_steps - start.step) * rollout.groups_per_step
        self._num_past_to_come = len(start.past_draws)
        self.trainer_waits: tuple[Wait, ...] = ()
        self._begin_step(start.step + 1)

    async def run(self) -> None:
        """Train the steps after ``start.step``, up to ``num_steps``; the last one's checkpoint is then whole.

        Raises:
            FourstrokeError: A part failed in a way that this incarnation does not survive; the first cause is raised.
        """
        training = asyncio.create_task(self._train_loop(), name="train")
        others = [
            asyncio.create_task(self._feed_loop(), name="feed"),
            asyncio.create_task(self._roll_out_loop(), name="roll out"),
            asyncio.create_task(self._batch_loop(), name="batch"),
            asyncio.create_task(self._watch_loop(), name="watch"),
        ]
        try:
            done, _ = await asyncio.wait([training, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: task is not training):
                with first_cause():
                    task.result()
                if task is not training:
                    raise LoopEndedError(f"the {task.get_name()} loop ended before the last step")
        finally:
            loops = [training, *others, *([self._checkpointing] if self._checkpointing else [])]
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    @property
    def waits(self) -> Waits:
        """What the loops wait for now."""
        return self._waits

    # --- feed -------------------------------------------------------------------------------------------------------

    async def _feed_loop(self) -> None:
        for past, task in itertools.chain(self._past(), self._fresh()):
            await self._draws.put((past, task))

    def _past(self) -> Iterator[tuple[PastDraw, Task]]:
        """Draws that an earlier incarnation left, in their order."""
        tasks = {task.id: task for task in self._tasks}
        for past in self._start.past_draws:
            if past.draw.task_id not in tasks:
                raise DataError(
                    f"draw {past.draw.key} is of task {past.draw.task_id}, which tasks.use gives no more; give it the "
                    "tasks again that the run began with"
                )
            yield past, tasks[past.draw.task_id]

    def _fresh(self) -> Iterator[tuple[PastDraw, Task]]:
        order = draw_order(self._tasks, seed=self._config.seed, after=self._start.cursor)
        return ((PastDraw(draw=draw, stored=None), task) for draw, task in order)

    # --- roll out ---------------------------------------------------------------------------------------------------

    async def _roll_out_loop(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                admitted = [one for one in await self._admit() if one is not None]
                if admitted and self._config.deterministic:
                    groups.create_task(self._roll_out_together(admitted), name="groups together")
                else:
                    for one in admitted:
                        groups.create_task(self._roll_out(one), name=f"group {one.draw.key}")

    async def _admit(self) -> list[Admitted | None]:
        """Draws for free slots: one, or in deterministic mode for all of them; None where a stored group is used."""
        async with self._slots_changed:
            with self._waits.noted("a free slot"):
                await self._slots_changed.wait_for(lambda: self._num_admissible() > 0)
        num_draws = self._num_admissible() if self._config.deterministic else 1
        return [await self._admit_one() for _ in range(num_draws)]

    def _num_admissible(self) -> int:
        return min(self._slots.num_free, self._num_wanted)

    async def _admit_one(self) -> Admitted | None:
        past, task = await self._draws.get()
        draw, version = past.draw, self._parts.fleet.version.number
        self._slots.take()
        self._num_wanted -= 1
        self._num_past_to_come -= self._is_past(draw)
        self._buffer.expect(draw.key)
        if past.stored is not None:
            self._tell(EventKind.GROUP_REUSED, group=draw.key, version=past.stored.admitted_version)
            await self._buffer.put(past.stored)
            return None
        if self._is_past(draw):
            self._parts.ledger.readmit(draw.key, version=version)
        else:
            self._parts.ledger.admit(draw, version=version)
        return Admitted(draw, task, version)

    def _is_past(self, draw: Draw) -> bool:
        """Whether the ledger has this draw from an earlier incarnation."""
        return self._start.cursor is not None and (draw.epoch, draw.index) <= self._start.cursor

    async def _roll_out(self, admitted: Admitted) -> None:
        with self._rollout_span.entered(self._now):
            outcome = await self._roller.roll(admitted)
        await self._finish_group(admitted.draw, outcome)

    async def _roll_out_together(self, admitted: Sequence[Admitted]) -> None:
        with self._rollout_span.entered(self._now):
            outcomes = await self._roller.roll_together(admitted)
        for one in admitted:
            await self._finish_group(one.draw, outcomes[one.draw.key])

    async def _finish_group(self, draw: Draw, outcome: GroupRecord | Dropped) -> None:
        if isinstance(outcome, Dropped):
            await self._drop(draw, reason=outcome.reason)
        else:
            self._num_drops_in_a_row = 0
            await self._buffer.put(outcome)

    def _on_record(self, group: GroupRecord) -> None:
        measures.add_rollout(self._book, group)
        self._num_sampled_tokens += group.num_sampled_tokens
        for event in measures.outcome_events(group, time_s=self._now() - self._outlets.origin_s):
            self._outlets.on_event(event)

    async def _drop(self, draw: Draw, *, reason: str) -> None:
        """Give a draw up: counted, its slot back at once, and a replacement enters at the tail."""
        self._write_off(draw, reason=reason)
        await self._buffer.forget(draw.key)
        await self._give_back(1)

    def _write_off(self, draw: Draw, *, reason: str) -> None:
        self._parts.ledger.mark_dropped(draw.key, reason=reason, step=self._step)
        self._tell(EventKind.GROUP_DROPPED, group=draw.key, task=draw.task_id, reason=reason)
        self._num_wanted += 1
        self._num_drops_in_a_row += 1
        if self._num_drops_in_a_row >= self._config.rollout.max_drops_in_a_row:
            raise TooManyDropsError(
                f"{self._num_drops_in_a_row} draws in a row were dropped, the last ({draw.key}) as {reason!r}; see "
                "events.jsonl for each, or raise rollout.max_drops_in_a_row"
            )

    async def _give_back(self, num_groups: int) -> None:
        async with self._slots_changed:
            self._slots.give_back(num_groups)
            self._slots_changed.notify_all()

    # --- batch ------------------------------------------------------------------------------------------------------

    async def _batch_loop(self) -> None:
        for step in itertools.count(self._start.step + 1):
            groups: list[GroupRecord] = []
            while len(groups) < self._config.rollout.groups_per_step:
                taken = await self._buffer.take(self._config.rollout.groups_per_step - len(groups))
                groups += [group for group in taken if not await self._is_stale(group, step=step)]
            await self._steps.put(groups)

    async def _is_stale(self, group: GroupRecord, *, step: int) -> bool:
        """The second check of the bound, which never finds anything while ``slots`` is right: drop, and count."""
        lag = step - 1 - group.oldest_version
        if lag <= self._config.rollout.staleness:
            return False
        self._write_off(group.draw, reason="stale")
        await self._give_back(1)
        return True

    # --- train ------------------------------------------------------------------------------------------------------

    async def _train_loop(self) -> None:
        last = self._config.num_steps
        for step in range(self._start.step + 1, last + 1):
            started_s = self._now()
            async with self._waits.within(self._groups_timeout_s(), f"the groups of step {step}"):
                groups = await self._steps.get()
            self._book.add("time/wait_s", self._now() - started_s)
            measures.add_groups(self._book, groups, trained_at=step - 1)
            training_s = self._now()
            await self._train(step, groups)
            publishing_s = self._now()
            await self._publish(step)
            self._parts.ledger.mark_trained([group.id for group in groups], step=step, version=step - 1)
            if step == last or step % self._config.checkpoint.every_steps == 0:
                await self._checkpoint(step)
            self._book.add("time/train_s", publishing_s - training_s)
            self._book.add("time/publish_s", self._now() - publishing_s)
            self._book.add("time/step_s", self._now() - started_s)
            self._finish_step(step)
            await self._give_back(len(groups))
        await self._checkpoint_is_whole()

    def _groups_timeout_s(self) -> float:
        """Longest that a step's groups can take if each draw and each replacement uses its own deadlines to the end."""
        rollout, tries = self._config.rollout, self._config.supervision.max_attempts
        return self._config.deadlines.group_s * (rollout.max_retries + tries) * (rollout.max_drops_in_a_row + 1)

    def _begin_step(self, step: int) -> None:
        self._step = self._roller.step = step
        self._book, self._rollout_span, self._num_sampled_tokens = MetricBook(step=step), measures.Span(), 0

    def _finish_step(self, step: int) -> None:
        measures.add_ledger(self._book, self._parts.ledger.audit(), num_to_come=self._num_past_to_come)
        self._book.add("time/rollout_s", self._rollout_span.seconds)
        measures.add_throughput(self._book, num_tokens=self._num_sampled_tokens, seconds=self._rollout_span.seconds)
        record = self._book.record()
        self._begin_step(step + 1)
        self._outlets.on_step(step, record)

    async def _train(self, step: int, groups: Sequence[GroupRecord]) -> None:
        config, trainer = self._config, self._parts.trainer
        batches = build_batches(groups, step=step, algorithm=config.algorithm, max_tokens=config.rollout.max_tokens)
        for batch in batches:
            async with self._within_train(f"the trainer to prepare step {step}"):
                await trainer.prepare(batch)
        for batch in batches:
            microbatches = self._plan(batch)
            passes = [await self._forward_backward(batch, microbatch) for microbatch in microbatches]
            measures.add_passes(self._book, num_rows=len(batch.rows), microbatches=microbatches, passes=passes)
            self._refuse_mismatch(step, passes)
            async with self._within_train(f"the optimiser's update of step {step}"):
                stats = await trainer.optim_step()
            measures.add_update(self._book, stats)

    def _within_train(self, what: str) -> AbstractAsyncContextManager[None]:
        return self._waits.within(self._config.deadlines.train_s, what)

    async def _forward_backward(self, batch: BatchRecord, microbatch: Microbatch) -> StepStats:
        async with self._within_train(f"a forward and backward pass of step {batch.step}"):
            return await self._parts.trainer.forward_backward(batch.update, microbatch)

    def _plan(self, batch: BatchRecord) -> tuple[Microbatch, ...]:
        """Micro-batches of the rows that can have a gradient; the others are in the counts already."""
        positions = needs_gradient(batch.rows, config=self._config.algorithm)
        lengths = [batch.rows[position].num_tokens for position in positions]
        shared = shared_among([row.num_shared_tokens for row in batch.rows], positions)
        microbatches = plan(lengths, shared=shared, max_tokens=self._config.trainer.microbatch_tokens)
        return tuple(Microbatch(rows=tuple(positions[i] for i in part.rows)) for part in microbatches)

    def _refuse_mismatch(self, step: int, passes: Sequence[StepStats]) -> None:
        """Stop before the update if engine and trainer disagree on what the sampled tokens' probabilities were."""
        mismatch, limit = measures.mean_abs_log_ratio(passes), measures.mismatch_limit(self._config)
        if mismatch > limit:
            raise MismatchError(
                f"step {step}: trainer and engine differ by {mismatch:.3g} nats a token, more than "
                f"trainer.max_mismatch = {limit:g}; the engine does not hold the trainer's weights, or computes "
                "otherwise"
            )

    async def _publish(self, step: int) -> None:
        """New weights, proved to have arrived, before any slot comes back."""
        async with self._waits.within(self._config.deadlines.publish_s, f"the weights of step {step} to land"):
            canary = self._parts.canary
            version = await self._parts.fleet.publish(lambda: self._written(step))
        self._tell(EventKind.WEIGHTS_LANDED, step=step, version=str(version))
        if canary.reading is not None:
            self._book.add("weights/canary/difference", canary.reading)
        if canary.is_rising:
            self._tell(EventKind.CANARY_RISING, step=step, reading=canary.reading or 0.0, floor=canary.floor or 0.0)

    async def _written(self, step: int) -> Publication:
        publication = await written(self._parts.trainer, step, canary=self._parts.canary, start=self._start)
        measures.add_publication(self._book, publication)
        return publication

    # --- checkpoints ------------------------------------------------------------------------------------------------

    async def _checkpoint(self, step: int) -> None:
        """Begin to write a checkpoint; it is written beside the next rollout, and awaited before the next one."""
        await self._checkpoint_is_whole()
        deadline_s = self._config.deadlines.save_s
        async with self._waits.within(deadline_s, f"the checkpoint of step {step} to begin"):
            await self._parts.trainer.save(str(self._outlets.checkpoint_path(step)), step=step)
        self._checkpointing = asyncio.create_task(self._write_checkpoint(step), name=f"checkpoint {step}")

    async def _write_checkpoint(self, step: int) -> None:
        async with self._waits.within(self._config.deadlines.save_s, f"the checkpoint of step {step} to be written"):
            await self._parts.trainer.flush()
        self._tell(EventKind.CHECKPOINT_WRITTEN, step=step)
        self._outlets.on_checkpoint(step)

    async def _checkpoint_is_whole(self) -> None:
        if self._checkpointing is not None:
            await self._checkpointing
            self._checkpointing = None

    # --- watch ------------------------------------------------------------------------------------------------------

    async def _watch_loop(self) -> None:
        """Look at the trainer, so that its death is named even while nobody waits for it."""
        while True:
            try:
                async with self._waits.within(self._config.deadlines.answer_s, "the trainer to say that it lives"):
                    self.trainer_waits = await self._parts.trainer.check_health()
            except DeadlineError as error:
                raise ActorDiedError(f"the trainer does not answer: {error}") from error
            # A checkpoint that failed stops the run now, not at the next one.
            if self._checkpointing is not None and self._checkpointing.done():
                self._checkpointing.result()
            await asyncio.sleep(self._config.deadlines.health_s)

    # --- time and events --------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tell(self, kind: EventKind, **fields: str | int | float) -> None:
        self._outlets.on_event(Event(kind=kind, time_s=self._now() - self._outlets.origin_s, fields=fields))
