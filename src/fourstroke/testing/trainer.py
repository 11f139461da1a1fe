"""A trainer without torch: its model is one number, which a gradient of the rows' advantages moves."""

from __future__ import annotations

import asyncio
import os

import numpy as np

from fourstroke.algorithms import LossMetric
from fourstroke.errors import ActorDiedError
from fourstroke.types import Batch, Column, Microbatch, Publication, StepStats, WeightVersion


class FakeTrainer:
    """Behind the ``Trainer`` protocol; records what it was asked to do.

    Args:
        verb_s: Seconds of the loop's clock that each verb takes.
        dies_at_step: Step at which ``optim_step`` raises as a dead process would, or None.
        mismatch: The ``abs_log_ratio`` that it reports for each loss token.
    """

    def __init__(self, *, verb_s: float = 1.0, dies_at_step: int | None = None, mismatch: float = 0.0) -> None:
        self._verb_s = verb_s
        self._dies_at_step = dies_at_step
        self._mismatch = mismatch
        self.trained_rows: list[list[str]] = [[]]
        self.published: list[int] = []
        self.saved: list[str] = []
        self.weight = 0.0
        self._gradient = 0.0
        self.is_closed = False

    async def start(self) -> None:
        """Be ready."""
        await self._work()

    async def prepare(self, batch: Batch) -> Batch:
        """Proximal log-probabilities equal to the behaviour's."""
        await self._work()
        rows = tuple(row.with_columns(proximal_logprobs=row[Column.BEHAVIOUR_LOGPROBS].copy()) for row in batch.rows)
        return Batch(
            step=batch.step, rows=rows, num_sequences=batch.num_sequences, num_loss_tokens=batch.num_loss_tokens
        )

    async def forward_backward(self, batch: Batch, microbatch: Microbatch) -> StepStats:
        """Note the rows; the gradient is the sum of weight times advantage."""
        await self._work()
        rows = [batch.rows[index] for index in microbatch.rows]
        self.trained_rows[-1] += [row.id for row in rows]
        self._gradient += float(sum(np.sum(row[Column.WEIGHT] * row[Column.ADVANTAGES]) for row in rows))
        num_tokens = sum(row.num_loss_tokens for row in rows)
        sums = dict.fromkeys((metric.value for metric in LossMetric), 0.0)
        sums |= {LossMetric.LOSS: -self._gradient, LossMetric.ABS_LOG_RATIO: self._mismatch * num_tokens}
        return StepStats(sums=sums, num_tokens=num_tokens)

    async def optim_step(self) -> StepStats:
        """Move the weight against the gradient."""
        await self._work()
        if self._dies_at_step == len(self.trained_rows):
            raise ActorDiedError("the trainer process 1 ended with signal 9; its log is none")
        self.weight += self._gradient
        stats = StepStats(sums={"grad_norm": abs(self._gradient), "learning_rate": 1.0}, num_tokens=0)
        self._gradient = 0.0
        self.trained_rows.append([])
        return stats

    async def publish(self, number: int) -> Publication:
        """A publication without tensors."""
        await self._work()
        self.published.append(number)
        version = WeightVersion(incarnation=0, number=number, digest=f"{number:032x}")
        return Publication(version=version, path="", size_bytes=0, tensors=())

    async def save(self, folder: str) -> None:
        """Make the folder, so that callers find one."""
        await self._work()
        os.makedirs(folder)  # noqa: PTH103 - a fake in a loop of virtual time
        self.saved.append(folder)

    async def check_health(self) -> None:
        """Always well until it dies in a verb."""

    async def close(self) -> None:
        """Nothing to give back."""
        self.is_closed = True

    async def _work(self) -> None:
        await asyncio.sleep(self._verb_s)
