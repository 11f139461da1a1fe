"""A trainer without torch: its model is one number, which a gradient of the rows' advantages moves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from fourstroke.algorithms import LossMetric
from fourstroke.errors import ActorDiedError, RunFolderError
from fourstroke.store.checkpoints import CHECKPOINT_MANIFEST
from fourstroke.store.files import write_atomic
from fourstroke.types import BatchRecord, Canary, Microbatch, Publication, StepStats, TensorEntry, Wait, WeightVersion

EMPTY_CANARY = Canary(ids_BT=np.zeros((0, 0), np.int32), logprobs_BT=np.zeros((0, 0), np.float32))


class _Saved(msgspec.Struct):
    """All of a fake trainer's state."""

    step: int
    weight: float
    trained: list[list[str]]


class FakeTrainer:
    """Behind the ``Trainer`` protocol; records what it was asked to do, and forgets it with its weights.

    Args:
        verb_s: Seconds of the loop's clock that each verb takes.
        dies_at_step: Step at which ``optim_step`` raises as a dead process would, or None.
        mismatch: The ``abs_log_ratio`` that it reports for each loss token.
        canary: What it says of fixed tokens under a version; without rows, which says nothing, if not given, since its
            one weight is no distribution.

    Attributes:
        trained: Ids of the rows that went into each update, as far as the present weights go.
        published: Versions published, as (incarnation, number).
        exported: Folders that the model was exported to.
    """

    def __init__(
        self,
        *,
        verb_s: float = 1.0,
        dies_at_step: int | None = None,
        mismatch: float = 0.0,
        canary: Callable[[int], Canary] = lambda _version: EMPTY_CANARY,
    ) -> None:
        self._verb_s = verb_s
        self._dies_at_step = dies_at_step
        self._mismatch = mismatch
        self._canary = canary
        self.trained: list[list[str]] = [[]]
        self.published: list[tuple[int, int]] = []
        self.exported: list[str] = []
        self.weight = 0.0
        self._batches: dict[int, BatchRecord] = {}
        self._gradient = 0.0
        self._checkpoint: tuple[Path, _Saved] | None = None
        self._obituary = ""
        self.is_closed = False

    async def start(self) -> None:
        """Be ready."""
        await self._work()

    async def prepare(self, batch: BatchRecord) -> None:
        """Keep the batch."""
        await self._work()
        if batch.update == 0:
            self._batches.clear()
        self._batches[batch.update] = batch

    async def forward_backward(self, update: int, microbatch: Microbatch) -> StepStats:
        """Note the rows; the gradient is the sum of weight times advantage."""
        await self._work()
        rows = [self._batches[update].rows[index] for index in microbatch.rows]
        self.trained[-1] += [row.id for row in rows]
        self._gradient += sum(row.weight * row.advantage * row.num_loss_tokens for row in rows)
        num_tokens = sum(row.num_loss_tokens for row in rows)
        sums = dict.fromkeys((metric.value for metric in LossMetric), 0.0)
        sums |= {LossMetric.LOSS: -self._gradient, LossMetric.ABS_LOG_RATIO: self._mismatch * num_tokens}
        return StepStats(sums=sums, num_tokens=num_tokens)

    async def optim_step(self) -> StepStats:
        """Move the weight against the gradient."""
        await self._work()
        if self._dies_at_step == len(self.trained):
            self.kill()
            self._check_alive()
        self.weight += self._gradient
        stats = StepStats(sums={"grad_norm": abs(self._gradient), "learning_rate": 1.0}, num_tokens=0)
        self._gradient = 0.0
        self.trained.append([])
        return stats

    async def publish(self, number: int, *, incarnation: int) -> Publication:
        """A publication of one tensor that lies nowhere; its digest says which weight it is."""
        await self._work()
        self.published.append((incarnation, number))
        digest = f"{number:016x}{hash(self.weight) & (2**64 - 1):016x}"
        version = WeightVersion(incarnation=incarnation, number=number, digest=digest)
        weights = TensorEntry(
            name="weights", dtype="float32", shape=(4,), offset=0, size_bytes=16, digest=version.digest, num_changed=1
        )
        return Publication(version=version, path="", size_bytes=16, tensors=(weights,))

    async def canary(self) -> Canary:
        """What it was made with, for the number of the newest publication."""
        await self._work()
        return self._canary(self.published[-1][1] if self.published else 0)

    async def save(self, folder: str, *, step: int) -> None:
        """Fix the state; ``flush`` writes it."""
        await self._work()
        saved = _Saved(step=step, weight=self.weight, trained=[list(rows) for rows in self.trained])
        self._checkpoint = Path(folder), saved

    async def flush(self) -> None:
        """Write the checkpoint, as a folder with its manifest."""
        await self._work()
        assert self._checkpoint is not None, "flush before save"
        folder, saved = self._checkpoint
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / CHECKPOINT_MANIFEST, msgspec.json.encode(saved))

    async def load(self, folder: str) -> int:
        """Restore what ``flush`` wrote."""
        await self._work()
        file = Path(folder) / CHECKPOINT_MANIFEST
        if not file.is_file():
            raise RunFolderError(f"{folder} is no whole checkpoint")
        saved = msgspec.json.decode(file.read_bytes(), type=_Saved)
        self.weight, self.trained, self._gradient = saved.weight, saved.trained, 0.0
        return saved.step

    async def export(self, folder: str) -> None:
        """Make the folder, so that callers find one."""
        await self._work()
        os.makedirs(folder)  # noqa: PTH103 - a fake in a loop of virtual time
        self.exported.append(folder)

    async def check_health(self) -> tuple[Wait, ...]:
        """Nothing, while it lives."""
        self._check_alive()
        return ()

    async def close(self) -> None:
        """Nothing to give back."""
        self._obituary = self._obituary or "the trainer was closed"
        self.is_closed = True

    def kill(self) -> None:
        """Die now, as a killed process does."""
        self._obituary = self._obituary or "trainer (process 1) is gone: signal 9; its log is none"

    def _check_alive(self) -> None:
        if self._obituary:
            raise ActorDiedError(self._obituary)

    async def _work(self) -> None:
        self._check_alive()
        await asyncio.sleep(self._verb_s)
        self._check_alive()
