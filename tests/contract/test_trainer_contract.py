"""One suite for the ``Trainer`` protocol, on the fake and on the real trainer in its own process."""

import asyncio
import contextlib
import os
import signal
import sys

import numpy as np
import psutil
import pytest

from fourstroke.config import load_config
from fourstroke.errors import ActorDiedError, DataError, RunFolderError
from fourstroke.orchestration.batching import build_batches
from fourstroke.orchestration.placement import TrainerProcess
from fourstroke.testing.episodes import make_group
from fourstroke.testing.run import tiny_model
from fourstroke.testing.trainer import FakeTrainer
from fourstroke.types import Column, Microbatch

CONFIG = load_config(
    {
        "trainer": {"compute_dtype": "float32", "microbatch_tokens": 128, "learning_rate": 1e-2, "num_threads": 1},
        "engine": {"dtype": "float32", "max_model_len": 64},
        "rollout": {"max_tokens": 8},
    }
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["fake", "process"])
def make_trainer(request, model, tmp_path):
    def make():
        if request.param == "fake":
            return FakeTrainer(verb_s=0.0)
        return TrainerProcess(
            CONFIG,
            model_path=model,
            publication_path=tmp_path / "weights",
            log_path=tmp_path / "trainer.log",
            environment={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    return make


def _batch(step=1):
    groups = [make_group([1.0, 0.0], index=0), make_group([0.0, 1.0, 1.0], index=1, reply_lengths=[2, 4, 3])]
    (batch,) = build_batches(groups, step=step, algorithm=CONFIG.algorithm, max_tokens=8)
    return batch


def _run(make_trainer, scenario):
    async def main():
        trainer = make_trainer()
        try:
            await trainer.start()
            return await scenario(trainer)
        finally:
            await trainer.close()
            await trainer.close()

    return asyncio.run(main())


def test_a_step_moves_the_weights_and_is_published_in_order(make_trainer):
    async def scenario(trainer):
        first = await trainer.publish(1)
        stats = await trainer.forward_backward(_batch(), Microbatch(rows=(0, 1, 2, 3, 4)))
        update = await trainer.optim_step()
        second = await trainer.publish(2)
        return first, stats, update, second

    first, stats, update, second = _run(make_trainer, scenario)

    assert stats.num_tokens == 2 * 3 + 2 + 4 + 3
    assert stats.sums["abs_log_ratio"] >= 0
    assert update.sums["grad_norm"] > 0
    assert (first.version.number, second.version.number) == (1, 2)
    assert first.version.digest != second.version.digest


def test_an_update_without_rows_is_legal(make_trainer):
    async def scenario(trainer):
        return await trainer.optim_step()

    assert _run(make_trainer, scenario).sums["grad_norm"] == 0


def test_prepare_adds_proximal_logprobs_and_changes_nothing_else(make_trainer):
    batch = _batch()

    async def scenario(trainer):
        return await trainer.prepare(batch)

    prepared = _run(make_trainer, scenario)

    for before, after in zip(batch.rows, prepared.rows, strict=True):
        assert set(after.columns) == {*before.columns, Column.PROXIMAL_LOGPROBS}
        assert np.all(np.isfinite(after[Column.PROXIMAL_LOGPROBS]))
        assert all(np.array_equal(after[column], before[column]) for column in before.columns)


def test_a_model_is_saved_where_it_was_asked_for(make_trainer, tmp_path):
    async def scenario(trainer):
        await trainer.save(str(tmp_path / "checkpoint"))

    _run(make_trainer, scenario)

    assert (tmp_path / "checkpoint").is_dir()


def test_it_is_well_while_it_lives(make_trainer):
    async def scenario(trainer):
        await trainer.check_health()

    _run(make_trainer, scenario)


# --- what only a process can do -------------------------------------------------------------------------------------


@pytest.fixture
def process(model, tmp_path):
    return TrainerProcess(
        CONFIG,
        model_path=model,
        publication_path=tmp_path / "weights",
        log_path=tmp_path / "trainer.log",
        environment={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _trainer_processes():
    """Those among this process's children; other tests may have left helpers of the interpreter's."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            if "trainer_process" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_an_error_crosses_the_process_as_itself(process):
    batch = _batch()
    bad = batch.rows[0][Column.BEHAVIOUR_LOGPROBS].copy()
    bad[-1] = np.nan
    rows = (batch.rows[0].with_columns(behaviour_logprobs=bad), *batch.rows[1:])

    async def scenario(trainer):
        broken = type(batch)(step=1, rows=rows, num_sequences=5, num_loss_tokens=15)
        with pytest.raises(DataError, match=rows[0].id):
            await trainer.forward_backward(broken, Microbatch(rows=(0,)))
        # The process is well, and the refused rows left no gradient behind.
        assert (await trainer.optim_step()).sums["grad_norm"] == 0

    _run(lambda: process, scenario)


def test_a_folder_that_exists_is_not_written_over(process, tmp_path):
    (tmp_path / "checkpoint").mkdir()

    async def scenario(trainer):
        with pytest.raises(RunFolderError, match="checkpoint"):
            await trainer.save(str(tmp_path / "checkpoint"))

    _run(lambda: process, scenario)


def test_a_death_is_named_in_a_verb_and_when_idle(process):
    async def scenario(trainer):
        (child,) = _trainer_processes()
        child.send_signal(signal.SIGKILL)
        with pytest.raises(ActorDiedError, match=rf"the trainer process {child.pid} ended with signal 9"):
            await trainer.optim_step()
        with pytest.raises(ActorDiedError, match="ended with signal 9"):
            await trainer.check_health()

    _run(lambda: process, scenario)


def test_nothing_is_left_after_close(process, tmp_path):
    async def scenario(_):
        return _trainer_processes()

    children = _run(lambda: process, scenario)

    assert len(children) == 1
    assert not children[0].is_running()
    assert not (tmp_path / "weights").exists()
