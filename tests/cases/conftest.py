"""What cases on the control plane share: one life of a run on fakes, and what an earlier one left."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import msgspec
import pytest

from fourstroke.config import load_config
from fourstroke.store import Audit, Ledger
from fourstroke.store.checkpoints import checkpoint_path
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.environment import FakeTaskset, ParityGrader
from fourstroke.testing.episodes import make_record
from fourstroke.testing.run import FakeParts, FakeRun
from fourstroke.testing.trainer import FakeTrainer

NUM_TASKS = 12


@pytest.fixture
def configure():
    """Makes configurations of small runs on fakes."""

    def config(*overrides, **rollout):
        base = {
            "rollout": {"group_size": 4, "max_tokens": 8, **rollout},
            "engine": {"max_model_len": 64},
            "trainer": {"microbatch_tokens": 64},
        }
        return load_config(base, overrides=overrides)

    return config


@dataclass
class Life:
    """One life of a run: how it ended and what it left."""

    error: Exception | None = None
    audit: Audit | None = None
    steps: list[int] = field(default_factory=list)
    parts: FakeParts | None = None

    @property
    def trainer(self):
        return self.parts.made_trainers[-1]


@pytest.fixture
def live():
    """Runs the real controller on fakes in a folder, from what lies there to its end or its death."""

    def lived(folder, config, *, num_tasks=NUM_TASKS, trainers=(), grader=None, meanwhile=None):
        life = Life()

        async def main():
            taskset = FakeTaskset(num_train=num_tasks)
            life.parts = FakeParts(taskset=taskset, grader=grader or ParityGrader(), trainers=trainers)
            run = FakeRun(config, folder, parts=life.parts, on_step=lambda step, _: life.steps.append(step))
            async with run.started():
                beside = asyncio.ensure_future(meanwhile(run)) if meanwhile else None
                try:
                    await run.train(taskset.train)
                except Exception as error:  # noqa: BLE001 - every end is looked at
                    life.error = error
                if beside:
                    await beside
                life.audit = run.ledger.audit()

        folder.mkdir(exist_ok=True)
        run_virtual(main())
        return life

    return lived


@pytest.fixture
def leave(tmp_path):
    """Leaves what an earlier life would have: draws trained in a step, with its checkpoint, and groups in the store."""

    def of_a_task(group):
        task = FakeTaskset(num_train=NUM_TASKS).train[group.draw.index % NUM_TASKS]
        return msgspec.structs.replace(group, draw=msgspec.structs.replace(group.draw, task_id=task.id))

    def left(*, step, trained, stored=()):
        trained, stored = [of_a_task(group) for group in trained], [of_a_task(group) for group in stored]
        folder = tmp_path / "past"
        (folder / "payload").mkdir(parents=True)
        with contextlib.closing(Ledger(folder / "ledger.sqlite")) as ledger:
            ledger.open_incarnation(from_step=0, reason="an earlier life")
            for group in (*trained, *stored):
                version = group.admitted_version
                ledger.admit(group.draw, version=version)
                ledger.begin_attempt(
                    group.id, incarnation=0, attempt=0, version=version, num_episodes=len(group.members)
                )
                assert ledger.receive(make_record(group))
            ledger.mark_trained([group.id for group in trained], step=step, version=step - 1)

        async def save():
            trainer = FakeTrainer(verb_s=0.0)
            await trainer.start()
            await trainer.save(str(checkpoint_path(folder / "checkpoints", step=step)), step=step)
            await trainer.flush()

        asyncio.run(save())
        return folder

    return left
