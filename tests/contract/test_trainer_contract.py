"""One suite for the ``Trainer`` protocol, on the fake and on the real trainer behind its actor's methods.

The real one is called as the driver calls it, in bytes of nouns, but in this process: Ray carries the same calls in
``tests/integration``.
"""

import asyncio

import msgspec
import pytest

from fourstroke.config import load_config
from fourstroke.errors import ActorDiedError, DataError, RunFolderError
from fourstroke.orchestration import actors
from fourstroke.orchestration.actors import TrainerActor, unpack
from fourstroke.orchestration.batching import build_batches
from fourstroke.orchestration.placement import RayTrainer
from fourstroke.store import PayloadWriter
from fourstroke.store.checkpoints import newest_checkpoint
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.testing.run import tiny_model
from fourstroke.testing.trainer import FakeTrainer
from fourstroke.types import Microbatch

CONFIG = load_config(
    {
        "trainer": {"compute_dtype": "float32", "microbatch_tokens": 128, "learning_rate": 1e-2, "num_threads": 1},
        "engine": {"dtype": "float32", "max_model_len": 64},
        "rollout": {"max_tokens": 8},
    }
)


class HereHandle:
    """Calls an actor's methods in this process; what ``placement`` does over Ray."""

    def __init__(self, actor):
        self._actor = actor
        self._is_closed = False

    def started(self, process_id):
        assert int(process_id) > 0

    async def call(self, verb, *arguments):
        if self._is_closed:
            raise ActorDiedError("trainer was closed")
        return unpack(getattr(self._actor, verb)(*arguments))

    async def close(self):
        if not self._is_closed:
            await self.call("close")
        self._is_closed = True


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def publication_path(tmp_path):
    return tmp_path / "weights"


def _real_trainer(model, folder, publication_path):
    trainer = object.__new__(RayTrainer)
    trainer._publication_path = publication_path
    trainer._handle = HereHandle(
        TrainerActor(
            CONFIG.model_dump_json(), str(model), str(folder), str(publication_path), str(folder / "trainer.log")
        )
    )
    return trainer


@pytest.fixture(params=["fake", "real"])
def make_trainer(request, model, tmp_path, publication_path, monkeypatch):
    monkeypatch.setattr(actors, "_settle", lambda log_path: None)  # it would send this process's output away

    def make():
        if request.param == "fake":
            return FakeTrainer(verb_s=0.0)
        return _real_trainer(model, tmp_path, publication_path)

    return make


@pytest.fixture
def records(tmp_path):
    """Two stored groups: members of 3 and 5, and of 2, 4 and 3 tokens."""
    groups = [
        make_group([1.0, 0.0], index=0, reply_lengths=[3, 5]),
        make_group([0.0, 1.0, 1.0], index=1, reply_lengths=[2, 4, 3]),
    ]
    writer = PayloadWriter(tmp_path)
    stored = [make_record(group, reference=writer.append(group)) for group in groups]
    writer.close()
    return stored


@pytest.fixture
def batch(records):
    (whole,) = build_batches(records, step=1, algorithm=CONFIG.algorithm, max_tokens=8)
    return whole


ALL_ROWS = Microbatch(rows=(0, 1, 2, 3, 4))


def _play(trainer, scenario):
    async def main():
        try:
            await trainer.start()
            return await scenario(trainer)
        finally:
            await trainer.close()
            await trainer.close()

    return asyncio.run(main())


async def _train(trainer, batch):
    await trainer.prepare(batch)
    stats = await trainer.forward_backward(batch.update, ALL_ROWS)
    return stats, await trainer.optim_step()


def test_a_step_moves_the_weights_and_is_published_in_order(make_trainer, batch):
    async def scenario(trainer):
        first = await trainer.publish(1, incarnation=0)
        stats, update = await _train(trainer, batch)
        return first, stats, update, await trainer.publish(2, incarnation=0)

    first, stats, update, second = _play(make_trainer(), scenario)

    assert stats.num_tokens == 3 + 5 + 2 + 4 + 3
    assert stats.sums["abs_log_ratio"] >= 0
    assert update.sums["grad_norm"] > 0
    assert update.sums["learning_rate"] > 0
    assert [(one.version.incarnation, one.version.number) for one in (first, second)] == [(0, 1), (0, 2)]
    assert first.version.digest != second.version.digest


def test_a_canary_is_of_the_present_weights_and_the_same_each_time(make_trainer, batch):
    async def scenario(trainer):
        before, again = await trainer.canary(), await trainer.canary()
        await _train(trainer, batch)
        return before, again, await trainer.canary()

    before, again, after = _play(make_trainer(), scenario)

    assert before.logprobs_BT.tobytes() == again.logprobs_BT.tobytes()
    assert before.ids_BT.tolist() == after.ids_BT.tolist()
    assert before.logprobs_BT.shape == (before.num_rows, max(0, before.ids_BT.shape[1] - 1))
    assert before.num_rows == 0 or before.logprobs_BT.tobytes() != after.logprobs_BT.tobytes()


def test_micro_batches_add_up(make_trainer, batch):
    async def scenario(trainer):
        await trainer.prepare(batch)
        parts = [await trainer.forward_backward(0, Microbatch(rows=rows)) for rows in ((0, 3), (1,), (2, 4))]
        return sum(part.num_tokens for part in parts), (await trainer.optim_step()).sums["grad_norm"]

    num_tokens, grad_norm = _play(make_trainer(), scenario)
    _, whole = _play(make_trainer(), lambda trainer: _train(trainer, batch))

    assert num_tokens == 17
    assert grad_norm == pytest.approx(whole.sums["grad_norm"], rel=1e-4)


def test_all_updates_of_a_step_are_prepared_and_then_made_one_after_the_other(make_trainer, records):
    algorithm = CONFIG.algorithm.model_copy(update={"updates_per_step": 2})
    batches = build_batches(records, step=1, algorithm=algorithm, max_tokens=8)

    async def scenario(trainer):
        for one in batches:
            await trainer.prepare(one)
        norms, digests = [], []
        for one in batches:
            await trainer.forward_backward(one.update, Microbatch(rows=tuple(range(len(one.rows)))))
            norms.append((await trainer.optim_step()).sums["grad_norm"])
            digests.append((await trainer.publish(1 + one.update, incarnation=0)).version.digest)
        return norms, digests

    norms, digests = _play(make_trainer(), scenario)

    assert min(norms) > 0
    assert len(set(digests)) == 2


def test_an_update_without_rows_is_legal(make_trainer):
    async def scenario(trainer):
        return await trainer.optim_step()

    assert _play(make_trainer(), scenario).sums["grad_norm"] == 0


def test_a_checkpoint_is_whole_once_it_is_flushed_and_holds_the_state_of_its_step(make_trainer, batch, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    folder = str(checkpoints / "step-000001")

    async def saved(trainer):
        await _train(trainer, batch)
        at_save = await trainer.publish(1, incarnation=0)
        await trainer.save(folder, step=1)
        await _train(trainer, batch)  # goes on while it is written
        later = await trainer.publish(2, incarnation=0)
        await trainer.flush()
        return at_save, later

    async def resumed(trainer):
        step = await trainer.load(folder)
        at_load = await trainer.publish(1, incarnation=1)
        await _train(trainer, batch)
        return step, at_load, await trainer.publish(2, incarnation=1)

    at_save, later = _play(make_trainer(), saved)
    assert newest_checkpoint(checkpoints) == 1
    step, at_load, again = _play(make_trainer(), resumed)

    assert step == 1
    assert at_load.version.digest == at_save.version.digest
    assert again.version.digest == later.version.digest
    assert at_load.version.incarnation == 1


def test_what_is_no_checkpoint_is_refused(make_trainer, tmp_path):
    async def scenario(trainer):
        with pytest.raises(RunFolderError, match="step-000007"):
            await trainer.load(str(tmp_path / "step-000007"))

    _play(make_trainer(), scenario)


def test_the_model_is_exported_where_it_was_asked_for(make_trainer, tmp_path):
    async def scenario(trainer):
        await trainer.export(str(tmp_path / "models" / "step-000001"))

    _play(make_trainer(), scenario)

    assert (tmp_path / "models" / "step-000001").is_dir()


def test_it_waits_for_nothing_while_nothing_is_asked(make_trainer):
    async def scenario(trainer):
        return await trainer.check_health()

    assert _play(make_trainer(), scenario) == ()


@pytest.mark.parametrize("verb", ["check_health", "optim_step", "flush"])
def test_after_close_every_call_says_so(make_trainer, verb):
    async def scenario(trainer):
        await trainer.close()
        with pytest.raises(ActorDiedError, match="was closed"):
            await getattr(trainer, verb)()

    _play(make_trainer(), scenario)


# --- what only the real trainer can do ------------------------------------------------------------------------------


@pytest.fixture
def real(model, tmp_path, publication_path, monkeypatch):
    monkeypatch.setattr(actors, "_settle", lambda log_path: None)
    return _real_trainer(model, tmp_path, publication_path)


def test_rows_that_are_refused_leave_no_gradient_behind(real, batch):
    wrong = msgspec.structs.replace(batch.rows[1], num_tokens=99)

    async def scenario(trainer):
        with pytest.raises(DataError, match=wrong.id):
            await trainer.prepare(msgspec.structs.replace(batch, rows=(batch.rows[0], wrong)))
        return (await trainer.optim_step()).sums["grad_norm"], await trainer.check_health()

    assert _play(real, scenario) == (0.0, ())


def test_nothing_is_left_in_shared_memory(real, publication_path):
    async def scenario(trainer):
        await trainer.publish(1, incarnation=0)
        return publication_path.exists()

    assert _play(real, scenario)
    assert not publication_path.exists()
