"""The controller: four loops that turn tasks into trained weights.

    tasks --feed--> draws --roll out--> groups --batch--> steps --train--> weights
                      ^                   |                                  |
                      |   dropped: slot back at once                         |
                      '------------ slots back when the weights landed <-----'

    loop       produces                         waits for                       unblocked by
    --------   ------------------------------   -----------------------------   -------------------------------
    feed       draws, in the seeded order       room in the queue of draws      roll out taking a draw
    roll out   graded groups, in the store      a free slot, then a draw        train (or a drop) freeing slots
    batch      P groups, oldest admitted first  P finished groups               roll out
    train      weights on the engine            a step's groups                 batch

Only the train loop ends by itself. Any other loop that returns is a fault and is raised; a fifth task only looks
whether the parts still live. A step is P groups; its slots come back when its weights have landed, so that with S = 0 a
step's groups are all sampled at the version that they train.

The controller wires and drives; it decides nothing itself. Decisions are in ``slots``, ``draws``, ``batching``,
``trainer.packing`` and ``algorithms``. No part holds the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fourstroke.algorithms import needs_gradient
from fourstroke.config import RunConfig
from fourstroke.errors import DataError, DoesNotFitError, MismatchError, PublicationError, TooManyDropsError
from fourstroke.observability import EventKind, MetricBook
from fourstroke.observability.events import Event
from fourstroke.orchestration import measures
from fourstroke.orchestration.batching import build_batches, group_rows
from fourstroke.orchestration.buffer import GroupBuffer
from fourstroke.orchestration.draws import draw_order
from fourstroke.orchestration.slots import Slots
from fourstroke.orchestration.waits import within
from fourstroke.rollout import GroupRunner
from fourstroke.store import Ledger, PayloadWriter
from fourstroke.trainer.packing import plan
from fourstroke.types import Batch, Draw, Engine, Group, Microbatch, StepStats, Task, Trainer

# Versions that a group may lag behind the weights that it trains; see slots.
_STALENESS = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the controller drives."""

    engine: Engine
    trainer: Trainer
    runner: GroupRunner
    ledger: Ledger
    payload: PayloadWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Where the controller tells of what it did.

    Attributes:
        on_step: Takes a finished step's number and record.
        on_event: Takes an event.
        origin_s: Time of the event loop from which events count.
    """

    on_step: Callable[[int, dict[str, float]], None]
    on_event: Callable[[Event], None]
    origin_s: float


class LoopEndedError(RuntimeError):
    """A loop that must not end returned."""


def _raise_first_cause(loop: asyncio.Task[None]) -> None:
    """Raise what a loop raised; of several that failed together, the first."""
    error = loop.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error


class Controller:
    """Drives one training run from its first step to its last."""

    def __init__(self, config: RunConfig, *, tasks: Sequence[Task], parts: Parts, outlets: Outlets) -> None:
        self._config = config
        self._tasks = tasks
        self._parts = parts
        self._outlets = outlets
        self._slots = Slots(groups_per_step=config.rollout.groups_per_step, staleness=_STALENESS)
        self._slots_changed = asyncio.Condition()
        self._draws: asyncio.Queue[tuple[Draw, Task]] = asyncio.Queue(maxsize=config.rollout.groups_per_step)
        self._buffer = GroupBuffer()
        self._steps: asyncio.Queue[list[Group]] = asyncio.Queue(maxsize=1)
        self._book = MetricBook(step=1)
        self._rollout_span = measures.Span()
        self._num_drops_in_a_row = 0

    async def run(self) -> None:
        """Train ``num_steps`` steps.

        Raises:
            FourstrokeError: A part failed in a way that the run does not survive; the first cause is raised.
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
                _raise_first_cause(task)
                if task is not training:
                    raise LoopEndedError(f"the {task.get_name()} loop ended before the last step")
        finally:
            for task in (training, *others):
                task.cancel()
            await asyncio.gather(training, *others, return_exceptions=True)

    # --- feed -------------------------------------------------------------------------------------------------------

    async def _feed_loop(self) -> None:
        for draw, task in draw_order(self._tasks, seed=self._config.seed):
            await self._draws.put((draw, task))

    # --- roll out ---------------------------------------------------------------------------------------------------

    async def _roll_out_loop(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._free_slot()
                draw, task = await self._draws.get()
                self._slots.take()
                version = self._parts.engine.version.number
                self._parts.ledger.admit(draw, version=version)
                self._buffer.expect(draw.key)
                groups.create_task(self._roll_out(draw, task, version), name=f"group {draw.key}")

    async def _free_slot(self) -> None:
        async with self._slots_changed:
            await self._slots_changed.wait_for(lambda: self._slots.num_free > 0)

    async def _roll_out(self, draw: Draw, task: Task, version: int) -> None:
        """One draw, to a stored group in the buffer or to a reason why not."""
        try:
            group = await self._scored_group(draw, task, version)
        except DoesNotFitError as error:
            self._tell(EventKind.TASK_REFUSED, task=task.id, reason=str(error))
            await self._drop(draw, reason="does_not_fit")
            return
        if len(group.scored) < self._config.rollout.min_scored:
            await self._drop(draw, reason="too_few_scored")
            return
        try:
            group_rows(group, algorithm=self._config.algorithm)
        except DataError as error:
            self._tell(EventKind.FAULT, group=draw.key, reason=str(error))
            await self._drop(draw, reason="not_finite")
            return
        # Written down before it is admitted to training: a crash after this line loses nothing.
        reference = self._parts.payload.append(group)
        self._parts.ledger.store_group(
            draw.key, reference, num_scored=len(group.scored), num_members=len(group.members)
        )
        self._num_drops_in_a_row = 0
        await self._buffer.put(group)

    async def _scored_group(self, draw: Draw, task: Task, version: int) -> Group:
        """The group of a draw, rolled again with the same seed while too few of its members have a score."""
        deadlines, rollout = self._config.deadlines, self._config.rollout
        for attempt in range(rollout.max_retries + 1):
            with self._rollout_span.entered(self._now):
                async with within(deadlines.group_s, f"group {draw.key}, attempt {attempt}, to be sampled and graded"):
                    group = await self._parts.runner.run(
                        draw, task, num_samples=rollout.group_size, admitted_version=version, attempt=attempt
                    )
            measures.add_rollout(self._book, group)
            for event in measures.outcome_events(group, time_s=self._now() - self._outlets.origin_s):
                self._outlets.on_event(event)
            if len(group.scored) >= rollout.min_scored or attempt == rollout.max_retries:
                break
            self._tell(EventKind.GROUP_RETRIED, group=draw.key, num_scored=len(group.scored))
        return group

    async def _drop(self, draw: Draw, *, reason: str) -> None:
        """Give a draw up: counted, its slot back at once, and a replacement enters at the tail."""
        self._parts.ledger.mark_dropped(draw.key, reason=reason)
        self._tell(EventKind.GROUP_DROPPED, group=draw.key, task=draw.task_id, reason=reason)
        self._num_drops_in_a_row += 1
        if self._num_drops_in_a_row >= self._config.rollout.max_drops_in_a_row:
            raise TooManyDropsError(
                f"{self._num_drops_in_a_row} draws in a row were dropped, the last ({draw.key}) as {reason!r}; see "
                "events.jsonl for each, or raise rollout.max_drops_in_a_row"
            )
        await self._buffer.forget(draw.key)
        await self._give_back(1)

    async def _give_back(self, num_groups: int) -> None:
        async with self._slots_changed:
            self._slots.give_back(num_groups)
            self._slots_changed.notify_all()

    # --- batch ------------------------------------------------------------------------------------------------------

    async def _batch_loop(self) -> None:
        while True:
            groups = await self._buffer.take(self._config.rollout.groups_per_step)
            await self._steps.put(groups)

    # --- train ------------------------------------------------------------------------------------------------------

    async def _train_loop(self) -> None:
        for step in range(1, self._config.num_steps + 1):
            started_s = self._now()
            async with within(self._groups_timeout_s(), f"the groups of step {step}"):
                groups = await self._steps.get()
            self._book.add("time/rollout_s", self._rollout_span.seconds)
            measures.add_groups(self._book, groups, trained_at=self._parts.engine.version.number)
            training_s = self._now()
            await self._train(step, groups)
            publishing_s = self._now()
            await self._publish(step)
            self._parts.ledger.mark_trained([group.id for group in groups], step=step, version=step - 1)
            self._book.add("time/train_s", publishing_s - training_s)
            self._book.add("time/publish_s", self._now() - publishing_s)
            self._book.add("time/step_s", self._now() - started_s)
            self._finish_step(step)
            # After the last step the slots stay taken, so that nothing is drawn which would not be trained.
            if step < self._config.num_steps:
                await self._give_back(len(groups))

    def _groups_timeout_s(self) -> float:
        """Longest that a step's groups can take if each draw and each replacement uses its own deadline to the end."""
        rollout = self._config.rollout
        return self._config.deadlines.group_s * (rollout.max_retries + 1) * (rollout.max_drops_in_a_row + 1)

    def _finish_step(self, step: int) -> None:
        measures.add_ledger(self._book, self._parts.ledger.audit())
        measures.add_throughput(self._book, seconds=self._rollout_span.seconds)
        record = self._book.record()
        self._book, self._rollout_span = MetricBook(step=step + 1), measures.Span()
        self._outlets.on_step(step, record)

    async def _train(self, step: int, groups: Sequence[Group]) -> None:
        config, trainer = self._config, self._parts.trainer
        batches = build_batches(groups, step=step, algorithm=config.algorithm, max_tokens=config.rollout.max_tokens)
        for batch in batches:
            # The first update's proximal policy is the current one; later updates need it written down before.
            update = await self._prepared(batch) if len(batches) > 1 else batch
            microbatches = self._plan(update)
            passes = [await self._forward_backward(update, microbatch) for microbatch in microbatches]
            measures.add_passes(self._book, update, microbatches, passes)
            self._refuse_mismatch(step, passes)
            async with within(config.deadlines.train_s, f"the optimiser's update of step {step}"):
                stats = await trainer.optim_step()
            measures.add_update(self._book, stats)

    async def _prepared(self, batch: Batch) -> Batch:
        async with within(self._config.deadlines.train_s, f"the proximal log-probabilities of step {batch.step}"):
            return await self._parts.trainer.prepare(batch)

    async def _forward_backward(self, batch: Batch, microbatch: Microbatch) -> StepStats:
        async with within(self._config.deadlines.train_s, f"a forward and backward pass of step {batch.step}"):
            return await self._parts.trainer.forward_backward(batch, microbatch)

    def _plan(self, batch: Batch) -> tuple[Microbatch, ...]:
        """Micro-batches of the rows that can have a gradient; the others are in the counts already."""
        positions = needs_gradient(batch.rows, config=self._config.algorithm)
        lengths = [batch.rows[position].num_tokens for position in positions]
        microbatches = plan(lengths, max_tokens=self._config.trainer.microbatch_tokens)
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
        engine = self._parts.engine
        async with within(self._config.deadlines.publish_s, f"the weights of step {step} to land on {engine.name}"):
            publication = await self._parts.trainer.publish(step)
            if publication.version.number != step:
                # An engine takes the version that it holds a second time, so that it would not find this.
                raise PublicationError(f"the trainer published version {publication.version} for step {step}")
            await engine.pause()
            version = await engine.update_weights(publication)
            await engine.resume()
        self._tell(EventKind.WEIGHTS_LANDED, step=step, version=str(version), engine=engine.name)

    # --- watch ------------------------------------------------------------------------------------------------------

    async def _watch_loop(self) -> None:
        """Look at the parts that work in other processes, so that a death is named even while nobody waits for them."""
        while True:
            await self._parts.engine.check_health()
            await self._parts.trainer.check_health()
            await asyncio.sleep(self._config.deadlines.health_s)

    # --- time and events --------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _tell(self, kind: EventKind, **fields: str | int | float) -> None:
        self._outlets.on_event(Event(kind=kind, time_s=self._now() - self._outlets.origin_s, fields=fields))
