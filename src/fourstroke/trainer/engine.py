"""The trainer of one process: the verbs of ``types.Trainer``, plain and synchronous; placement makes a process of it.

Blind to reinforcement learning: rows say which tokens count and by how much, and the loss is handed in. Gradients of
micro-batches add up in fp32 until ``optim_step``, so that a step does not depend on how its rows were cut.

    caller   optim_step  save ............ publish  prepare  forward_backward  optim_step ...
                           |                                                   ^ waits for
    writer                 `---- reads masters and moments in place, to disk --'

A checkpoint is written by one thread while the caller goes on. No copy of the tensors is made; the verbs that would
change them (``optim_step``, ``load``) first wait for the writer, and all others only read them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fourstroke.algorithms.inputs import LossInputs, LossOutput
from fourstroke.config import RunConfig
from fourstroke.errors import DataError
from fourstroke.observability import give_back_heap
from fourstroke.tokens import canary_ids, num_shared
from fourstroke.trainer.checkpoint import begin_checkpoint, read_checkpoint, write_checkpoint
from fourstroke.trainer.model import PolicyModel
from fourstroke.trainer.optimiser import Optimiser
from fourstroke.trainer.packing import assemble, plan
from fourstroke.types import Batch, Canary, Column, Microbatch, Publication, StepStats, Trajectory
from fourstroke.weights.publish import Publisher, TensorSpec

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TorchTrainer:
    """Trains one model on CPU, or on the first GPU where there is one.

    Life: ``start``, then any number of steps (``prepare`` at will, ``forward_backward`` for each micro-batch,
    ``optim_step``, ``publish``; between two steps ``save`` and ``load``), and ``close``, which may be called twice.

    With ``config.deterministic``, equal calls give equal bits in any process on one type of machine. That needs, beside
    what ``start`` sets for the whole process, variables that libraries read when they are loaded, so that whoever
    starts the process must set them: ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` for CUDA (torch refuses to go on without), and
    ``MKL_CBWR=AUTO``, by which MKL promises equal results from run to run at an equal number of threads.

    Args:
        config: Read for ``trainer``, ``deterministic``, ``rollout.temperature`` and ``engine.dtype``.
        model_path: Folder of the model in Hugging Face format.
        publication_path: File in shared memory that weights are published through.
        loss: The loss of a micro-batch's loss tokens, ``algorithms.losses.bind_loss(config.algorithm)`` say.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        model_path: Path,
        publication_path: Path,
        loss: Callable[[LossInputs], LossOutput],
    ) -> None:
        """Keep the settings; nothing is loaded before ``start``."""
        self._config = config
        self._model_path = model_path
        self._publication_path = publication_path
        self._loss = loss
        self._step = -1
        self._is_between_steps = True
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._publisher: Publisher | None = None

    def start(self) -> None:
        """Load the model; the optimiser is fresh.

        Raises:
            ModelNotFoundError: The folder is no whole checkpoint.
            ConfigError: The model is one that we cannot train faithfully.
        """
        trainer = self._config.trainer
        if self._config.deterministic:
            torch.use_deterministic_algorithms(mode=True)
            torch.backends.cudnn.benchmark = False
        torch.set_num_threads(trainer.num_threads or len(os.sched_getaffinity(0)))
        self._model = PolicyModel.load(
            self._model_path,
            compute_dtype=_DTYPES[trainer.compute_dtype],
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        )
        self._canary_ids_BT = canary_ids(self._model_path, vocab_size=self._model.vocab_size)
        self._optimiser = Optimiser(
            self._model.masters,
            config=trainer,
            num_updates=self._config.num_steps * self._config.algorithm.updates_per_step,
        )
        self._publisher = Publisher(
            self._publication_path,
            entries=[
                TensorSpec(name=name, dtype=self._config.engine.dtype, shape=shape)
                for name, shape in self._model.shapes.items()
            ],
        )
        # Nobody reads this one: it makes the buffer's pages warm, and is what the first publication is compared with.
        self.publish(0, incarnation=0)

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Batch:
        """The batch with ``Column.PROXIMAL_LOGPROBS``: log-probabilities under the weights as they are now.

        Raises:
            DataError: A row is longer than ``trainer.microbatch_tokens``, or its first token is a loss token.
        """
        rows = list(batch.rows)
        ids = [row[Column.IDS] for row in rows]
        microbatches = plan(
            [row.num_tokens for row in rows],
            shared=[0, *itertools.starmap(num_shared, itertools.pairwise(ids))][: len(ids)],
            max_tokens=self._config.trainer.microbatch_tokens,
        )
        for microbatch in microbatches:
            members = [rows[position] for position in microbatch.rows]
            logprobs_N = self._forward(members)[0].float().cpu().numpy()
            ends = np.cumsum([row.num_loss_tokens for row in members])[:-1]
            for position, row_logprobs_N in zip(microbatch.rows, np.split(logprobs_N, ends), strict=True):
                row = rows[position]
                column_T = np.zeros(row.num_tokens, dtype=np.float32)
                column_T[row[Column.LOSS_MASK]] = row_logprobs_N
                rows[position] = row.with_columns(proximal_logprobs=column_T)
        return Batch(
            step=batch.step, rows=tuple(rows), num_sequences=batch.num_sequences, num_loss_tokens=batch.num_loss_tokens
        )

    def forward_backward(self, batch: Batch, microbatch: Microbatch) -> StepStats:
        """Add the micro-batch's gradient to the step's.

        Args:
            batch: Rows with ids, loss mask, behaviour log-probabilities, advantages and weights, and, where ``prepare``
                ran, proximal log-probabilities; without them the current ones stand in.
            microbatch: Which rows; may be empty.

        Returns:
            The loss's sums over the micro-batch's loss tokens, and their number.

        Raises:
            DataError: A value of a loss token is not finite, or a row's first token is a loss token; names the row.
        """
        self._step = batch.step
        rows = [batch.rows[position] for position in microbatch.rows]
        num_tokens = sum(row.num_loss_tokens for row in rows)
        if num_tokens == 0:
            return StepStats(sums={}, num_tokens=0)
        output = self._loss(loss_inputs(rows, *self._forward(rows)))
        self._is_between_steps = False
        output.loss_sum.backward()  # type: ignore[no-untyped-call]
        return StepStats(
            sums={metric.value: float(value) for metric, value in output.sums.items()}, num_tokens=num_tokens
        )

    def optim_step(self) -> StepStats:
        """Clip, apply and clear the gradient. Sums hold ``grad_norm`` (before the clip) and ``learning_rate``.

        Waits for a checkpoint that is being written.

        Raises:
            DataError: The gradient's norm is not finite; the text names the step, and nothing was applied.
        """
        self._wait_for_writer()
        self._is_between_steps = True
        grad_norm, learning_rate = self._optimiser.step(name=f"step {self._step}")
        self._model.refresh()
        give_back_heap()
        return StepStats(sums={"grad_norm": grad_norm, "learning_rate": learning_rate}, num_tokens=0)

    def publish(self, number: int, *, incarnation: int) -> Publication:
        """Write the weights, in the engine's type, where engines read them.

        Args:
            number: Number of the publication.
            incarnation: Which incarnation of the run publishes.
        """
        assert self._publisher is not None, "publish before start, or after close"
        dtype = _DTYPES[self._config.engine.dtype]
        return self._publisher.publish(number, self._model.tensors(lambda _: dtype), incarnation=incarnation)

    @torch.no_grad()
    def canary(self) -> Canary:
        """What the weights say now of fixed tokens, the same at each call and in each process."""
        ids_BT = self._canary_ids_BT
        packed = assemble(list(ids_BT))
        sources = np.concatenate([slots[:-1] for slots in packed.slots])
        targets = ids_BT[:, 1:].ravel().astype(np.int64)
        logprobs_N, _ = self._model.token_logprobs(packed, sources, targets, temperature=1.0)
        logprobs_BT = logprobs_N.float().cpu().numpy().reshape(len(ids_BT), -1)
        return Canary(ids_BT=ids_BT, logprobs_BT=logprobs_BT)

    def save(self, folder: str, *, step: int) -> None:
        """Begin to write a checkpoint of the present state, and return at once; ``flush`` tells when it is on disk.

        Legal only between steps: while a gradient is pending, an assertion fails.

        Args:
            folder: Where; ``checkpoint.checkpoint_path`` gives the name under which it is found again.
            step: Steps that the state contains.

        Raises:
            RunFolderError: ``folder`` exists or cannot be made, or the last checkpoint failed and nobody asked.
        """
        assert self._is_between_steps, f"save of step {step} while a gradient is pending"
        self.flush()
        state, partial = self._optimiser.state(step=step), begin_checkpoint(Path(folder))
        self._writing = self._writer.submit(write_checkpoint, Path(folder), state, partial=partial)

    def flush(self) -> None:
        """Return once the last checkpoint is whole on disk.

        Raises:
            RunFolderError: It could not be written: the disk is full, say. Nothing is left of it.
        """
        self._wait_for_writer()
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def load(self, folder: str) -> int:
        """Go on from a checkpoint exactly: weights, moments, counters; a pending gradient is cleared.

        Returns:
            Steps that the state contains.

        Raises:
            RunFolderError: It is no whole checkpoint of this model; the text names the tensor, and nothing was changed.
        """
        self._wait_for_writer()
        shapes = {name: tuple(master.shape) for name, master in self._model.masters.items()}
        state = read_checkpoint(Path(folder), shapes=shapes)
        self._optimiser.restore(state)
        self._model.refresh()
        self._is_between_steps = True
        self._step = state.step
        return state.step

    def export(self, folder: str) -> None:
        """Write the model in Hugging Face format, whole or not at all.

        Raises:
            RunFolderError: ``folder`` exists.
        """
        self._model.export(Path(folder))

    def close(self) -> None:
        """Unlink the shared buffer, and wait for a checkpoint that is being written. May be called twice."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._writer.shutdown()

    def _wait_for_writer(self) -> None:
        """Let the writer end, well or not; what it raised is for ``flush``."""
        if self._writing is not None:
            wait([self._writing])

    def _forward(self, rows: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [N] of the rows' loss tokens."""
        packed = assemble([row[Column.IDS] for row in rows])
        sources, targets = [], []
        for row, slots_T in zip(rows, packed.slots, strict=True):
            positions_N = np.flatnonzero(row[Column.LOSS_MASK])
            if row[Column.LOSS_MASK][0]:
                raise DataError(f"row {row.id}: its first token is a loss token, but nothing predicts it; mask it")
            sources.append(slots_T[positions_N - 1])
            targets.append(row[Column.IDS][positions_N].astype(np.int64))
        return self._model.token_logprobs(
            packed,
            np.concatenate(sources),
            np.concatenate(targets),
            temperature=self._config.rollout.temperature,
        )


def loss_inputs(rows: Sequence[Trajectory], logprobs_N: Tensor, entropy_N: Tensor) -> LossInputs:
    """The loss tokens of rows with what the model says of them.

    Values are picked by the loss mask before anything is done with them, so nothing under the mask can matter.

    Args:
        rows: The rows of a micro-batch.
        logprobs_N: Current log-probabilities of the loss tokens, in row order; their type and device are used for all.
        entropy_N: Entropies of the same.
    """

    def picked(column: Column) -> Tensor:
        values_N = np.concatenate([row[column][row[Column.LOSS_MASK]] for row in rows])
        return torch.from_numpy(values_N).to(logprobs_N.device, logprobs_N.dtype)

    is_prepared = all(Column.PROXIMAL_LOGPROBS in row.columns for row in rows)
    sequence_N = np.repeat(np.arange(len(rows)), [row.num_loss_tokens for row in rows])
    return LossInputs(
        logprobs_N=logprobs_N,
        entropy_N=entropy_N,
        behaviour_logprobs_N=picked(Column.BEHAVIOUR_LOGPROBS),
        proximal_logprobs_N=picked(Column.PROXIMAL_LOGPROBS) if is_prepared else logprobs_N.detach(),
        advantages_N=picked(Column.ADVANTAGES),
        weight_N=picked(Column.WEIGHT),
        sequence_N=torch.from_numpy(sequence_N).to(logprobs_N.device),
        row_ids=tuple(row.id for row in rows),
    )
