"""Faults of the control plane that simulated runs found, each in the smallest setting that shows it."""

import asyncio

import pytest

from fourstroke.config import load_config
from fourstroke.engines.fleet import Fleet
from fourstroke.engines.vllm import CHECKPOINT, REPLACEMENT
from fourstroke.errors import ActorDiedError, EngineDiedError
from fourstroke.orchestration.restore import restore
from fourstroke.rollout import WorkerPool
from fourstroke.store import Ledger
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine
from fourstroke.types import (
    Draw,
    EpisodeRecord,
    GroupRecord,
    PayloadReference,
    Publication,
    RowShape,
    Scored,
    StopReason,
    Unscored,
    VersionRun,
    WeightVersion,
)

DRAW = Draw(epoch=0, index=0, task_id="a", seed=7)


def _record(*, num_scored):
    verdicts = [
        Scored(score=float(member), components={}, reason="", grader="g@0", cost_s=0.0)
        if member < num_scored
        else Unscored(reason="timeout", detail="", grader="g@0", cost_s=0.0)
        for member in range(2)
    ]
    return GroupRecord(
        draw=DRAW,
        admitted_version=0,
        incarnation=0,
        attempt=0,
        episodes=tuple(
            EpisodeRecord(
                member=member,
                stop=StopReason.FINISHED,
                verdict=verdict,
                num_sampled_tokens=1,
                versions=(VersionRun(version=0, num_tokens=1),),
                rows=(RowShape(num_tokens=2, num_loss_tokens=1, num_shared_tokens=0),),
                failure="",
            )
            for member, verdict in enumerate(verdicts)
        ),
        reference=PayloadReference(segment=0, offset=0, length=1, digest="0" * 16),
    )


def _restored(folder, *, num_scored):
    """A run that was killed right after the receipt of a group, and resumed."""
    ledger = Ledger(folder / "ledger.sqlite")
    config = load_config({"rollout": {"group_size": 2, "min_scored": 2}})
    ledger.open_incarnation(from_step=0, reason="start")
    ledger.admit(DRAW, version=0)
    ledger.begin_attempt(DRAW.key, incarnation=0, attempt=0, version=0, num_episodes=2)
    assert ledger.receive(_record(num_scored=num_scored))
    start = restore(ledger, config, step=0, reason="killed")
    audit = ledger.audit()
    ledger.close()
    return start.past_draws, audit


def test_a_stored_group_with_too_few_scores_is_rolled_again(tmp_path):
    (past,), audit = _restored(tmp_path, num_scored=1)

    assert past.stored is None
    assert audit.attempts_dropped_by_reason == {"too_few_scored": 1}
    assert audit.balanced


def test_a_stored_group_with_enough_scores_is_used_again(tmp_path):
    (past,), audit = _restored(tmp_path, num_scored=2)

    assert past.stored == _record(num_scored=2)
    assert audit.attempts_dropped == 0


# --- engines --------------------------------------------------------------------------------------------------------


class SlowEngine(FakeEngine):
    """Takes a minute to start."""

    async def start(self):
        await asyncio.sleep(60)
        await super().start()


class Scene:
    """A fleet of slow engines and all engines ever made."""

    def __init__(self, *, is_fresh=True, on_routable=None):
        self.made = {}
        self.fleet = Fleet(self._make, count=2, is_fresh=is_fresh, on_routable=on_routable or self._on_routable)

    def _make(self, name, is_replacement):
        self.made[name] = SlowEngine(name=name, held=REPLACEMENT if is_replacement else CHECKPOINT)
        return self.made[name]

    async def _on_routable(self, engines):
        pass

    async def publish(self, number, *, incarnation=0):
        async def write():
            version = WeightVersion(incarnation=incarnation, number=number, digest=f"{incarnation}-{number}")
            return Publication(version=version, path="", size_bytes=0, tensors=())

        await self.fleet.publish(write)

    @property
    def held(self):
        return {engine.name: (engine.version.incarnation, engine.version.number) for engine in self.fleet.routable}


def test_a_successor_waits_for_the_next_publication_where_the_bytes_of_the_last_are_gone():
    async def scenario():
        scene = Scene()
        await scene.fleet.start()
        await scene.publish(1)
        await scene.fleet.withdraw()  # a new trainer starts
        await scene.fleet.replace("vllm-0")
        before = scene.held
        await scene.publish(0, incarnation=1)
        return before, scene.held

    before, after = run_virtual(scenario())

    assert before == {"vllm-1": (0, 1)}
    assert after == {"vllm-1": (1, 0), "vllm-2": (1, 0)}


def test_a_successor_does_not_read_a_publication_that_is_being_written_over():
    async def scenario():
        scene = Scene()
        await scene.fleet.start()
        await scene.publish(1)

        async def dies():
            raise ActorDiedError("the trainer is gone")

        with pytest.raises(ActorDiedError):
            await scene.fleet.publish(dies)
        await scene.fleet.replace("vllm-0")
        return scene.held

    assert run_virtual(scenario()) == {"vllm-1": (0, 1)}


def test_an_engine_of_a_resumed_run_may_die_before_the_first_publication():
    async def scenario():
        scene = Scene(is_fresh=False)
        await scene.fleet.start()
        await scene.fleet.replace("vllm-0")
        await scene.publish(3, incarnation=1)
        return scene.held

    assert run_virtual(scenario()) == {"vllm-1": (1, 3), "vllm-2": (1, 3)}


def test_a_forgotten_engine_ends_although_a_worker_is_not_to_be_told():
    async def scenario():
        told = asyncio.Event()

        async def never_at_last(engines):
            if len(engines) == 1:
                told.set()
                await asyncio.Event().wait()

        scene = Scene(on_routable=never_at_last)
        await scene.fleet.start()
        forgetting = asyncio.create_task(scene.fleet.forget("vllm-0"))
        await told.wait()
        forgetting.cancel()
        await asyncio.gather(forgetting, return_exceptions=True)
        await scene.made["vllm-0"].check_health()

    with pytest.raises(EngineDiedError, match="closed"):
        run_virtual(scenario())


# --- workers --------------------------------------------------------------------------------------------------------


class SlowWorker:
    """Takes a minute to start and a second to be told of engines."""

    def __init__(self, name):
        self.name, self.engines, self.is_closed = name, None, False

    async def start(self):
        await asyncio.sleep(60)

    async def route(self, engines):
        await asyncio.sleep(1)
        self.engines = list(engines)

    async def close(self):
        self.is_closed = True


def _pool(made):
    def make(name):
        made[name] = SlowWorker(name)
        return made[name]

    return WorkerPool(make, count=1)


def test_a_successor_knows_the_engines_that_changed_while_it_was_told():
    async def scenario():
        made = {}
        pool = _pool(made)
        await pool.start()
        await pool.route(("a",))
        replacing = asyncio.create_task(pool.replace("worker-0"))
        await asyncio.sleep(60.5)  # it started, and is being told
        await pool.route(("a", "b"))
        await replacing
        return made["worker-1"].engines

    assert run_virtual(scenario()) == ["a", "b"]


def test_a_successor_that_is_starting_ends_with_the_run():
    async def scenario():
        made = {}
        pool = _pool(made)
        await pool.start()
        replacing = asyncio.create_task(pool.replace("worker-0"))
        await asyncio.sleep(10)
        replacing.cancel()
        await asyncio.gather(replacing, return_exceptions=True)
        await pool.close()
        return made["worker-1"].is_closed

    assert run_virtual(scenario())
