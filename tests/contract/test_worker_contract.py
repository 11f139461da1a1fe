"""One suite for the ``Worker`` protocol: the real worker with grader processes and a tokenizer, and the fake of it.

Both sample on fake engines. The fake runs in virtual time; the real one, which has processes, in real time.
"""

import asyncio
import dataclasses
import os

import msgspec
import pytest

from fourstroke.config import load_config
from fourstroke.engines.router import Router
from fourstroke.errors import ActorDiedError, EngineDiedError
from fourstroke.observability import Waits
from fourstroke.rewards import GraderPool
from fourstroke.rollout import GroupRunner, RolloutWorker
from fourstroke.store import PayloadWriter, read_payload
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.testing.environment import FakeTaskset, ParityGrader
from fourstroke.testing.run import FakeWorker, tiny_model
from fourstroke.tokens import Renderer
from fourstroke.types import Assignment, Draw, Group, RefusedGroup, StopReason

CONFIG = load_config(
    {
        "grader": {"use": "fourstroke.testing.environment:parity"},
        "rollout": {"max_tokens": 6},
        "engine": {"max_model_len": 64},
    }
)
ENGINE = FakeEngineSettings(vocab_size=257, max_model_len=64, token_s=0.002)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def _real_worker(folder, model):
    router, waits = Router(), Waits("worker-0")
    graders = GraderPool(CONFIG.grader, timeout_s=30, environment=dict(os.environ), log_path=folder / "worker-0.log")
    runner = GroupRunner(
        CONFIG, taskset=FakeTaskset(), graders=graders, sampler=router, renderer=Renderer(model), waits=waits
    )
    payload = PayloadWriter(folder / "payload")
    return RolloutWorker("worker-0", runner=runner, router=router, payload=payload, waits=waits)


@pytest.fixture(params=["fake", "real"])
def play(request, tmp_path, model):
    """Runs a scenario with a worker that has started."""
    (tmp_path / "payload").mkdir()

    async def main(scenario):
        if request.param == "fake":
            worker = FakeWorker(
                "worker-0",
                config=CONFIG,
                taskset=FakeTaskset(),
                grader=ParityGrader(),
                payload_dir=tmp_path / "payload",
            )
        else:
            worker = _real_worker(tmp_path, model)
        try:
            await worker.start()
            return await scenario(worker)
        finally:
            await worker.close()
            await worker.close()

    return lambda scenario: (run_virtual if request.param == "fake" else asyncio.run)(main(scenario))


def _assignment(index=0, *, attempt=0, num_samples=3):
    task = FakeTaskset().train[index]
    draw = Draw(epoch=0, index=index, task_id=task.id, seed=100 * index)
    return Assignment(draw=draw, task=task, num_samples=num_samples, admitted_version=0, incarnation=1, attempt=attempt)


def _too_long():
    assignment = _assignment(7)
    message = msgspec.structs.replace(assignment.task.prompt[0], content="x" * 60)
    return msgspec.structs.replace(assignment, task=msgspec.structs.replace(assignment.task, prompt=(message,)))


async def _engine(name="vllm-0", **changes):
    engine = FakeEngine(dataclasses.replace(ENGINE, **changes), name=name)
    await engine.start()
    return engine


def _replies(folder, record):
    group = read_payload(folder / "payload", record.reference, Group)
    return [member.episode.spans[1].ids.tolist() for member in group.members]


def test_each_assignment_is_answered_in_its_place_with_what_was_stored(play, tmp_path):
    async def scenario(worker):
        await worker.route([await _engine()])
        return await worker.run([_assignment(0), _too_long(), _assignment(1, attempt=2)], is_together=False)

    first, refusal, second = play(scenario)

    assert isinstance(refusal, RefusedGroup)
    assert (refusal.key, refusal.reason) == ("e0000-i000007", "does_not_fit")
    assert [(one.id, one.incarnation, one.attempt) for one in (first, second)] == [
        ("e0000-i000000", 1, 0),
        ("e0000-i000001", 1, 2),
    ]
    for record in (first, second):
        group = read_payload(tmp_path / "payload", record.reference, Group)
        assert group.draw == record.draw
        assert group.scores_G.tolist() == record.scores_G.tolist()
        assert len(record.scored) == 3
        assert record.num_sampled_tokens == sum(len(reply) for reply in _replies(tmp_path, record))
        assert {episode.stop for episode in record.episodes} <= {StopReason.FINISHED, StopReason.LENGTH}


def test_groups_together_and_alone_are_the_same(play, tmp_path):
    async def scenario(worker):
        await worker.route([await _engine()])
        assignments = [_assignment(index) for index in range(3)]
        together = await worker.run(assignments, is_together=True)
        alone = [record for one in assignments for record in await worker.run([one], is_together=False)]
        return together, alone

    together, alone = play(scenario)

    for one, other in zip(together, alone, strict=True):
        assert _replies(tmp_path, one) == _replies(tmp_path, other)
        assert one.scores_G.tolist() == other.scores_G.tolist()


def test_an_engines_death_is_told_and_another_engine_serves(play):
    async def scenario(worker):
        await worker.route([await _engine(dies_at_request=0)])
        with pytest.raises(EngineDiedError, match="vllm-0: process 4711 ended with signal 9"):
            await worker.run([_assignment()], is_together=False)
        await worker.route([await _engine("vllm-1")])
        (record,) = await worker.run([_assignment(attempt=1)], is_together=False)
        return record.attempt

    assert play(scenario) == 1


def test_without_an_engine_it_waits_and_says_so(play):
    async def scenario(worker):
        running = asyncio.create_task(worker.run([_assignment()], is_together=False))
        await asyncio.sleep(0.05)
        waits = await worker.check_health()
        await worker.route([await _engine()])
        (record,) = await running
        return waits, record.id, await worker.check_health()

    waits, key, after = play(scenario)

    assert [(wait.part, wait.what) for wait in waits] == [("worker-0", "request e0000-i000000.r1.a0.m0 to be sampled")]
    assert (key, after) == ("e0000-i000000", ())


def test_a_caller_that_is_cancelled_takes_its_work_along(play):
    began = asyncio.Event()

    class Noting(FakeEngine):
        """Says when a request came."""

        async def generate(self, request):
            began.set()
            return await super().generate(request)

    async def scenario(worker):
        engine = Noting(dataclasses.replace(ENGINE, token_s=1.0), name="vllm-0")
        await engine.start()
        await worker.route([engine])
        running = asyncio.create_task(worker.run([_assignment()], is_together=False))
        await began.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return engine.num_running, await worker.check_health()

    assert play(scenario) == (0, ())


# --- what only the fake can do: die in this process -----------------------------------------------------------------


def test_a_dead_worker_fails_what_waits_and_all_that_comes(tmp_path):
    async def scenario():
        worker = FakeWorker(
            "worker-0", config=CONFIG, taskset=FakeTaskset(), grader=ParityGrader(), payload_dir=tmp_path
        )
        await worker.start()
        await worker.route([await _engine()])
        running = asyncio.create_task(worker.run([_assignment()], is_together=False))
        await asyncio.sleep(0.003)
        worker.kill()
        with pytest.raises(ActorDiedError, match="worker-0"):
            await running
        for call in (worker.check_health(), worker.route([]), worker.run([], is_together=False)):
            with pytest.raises(ActorDiedError, match="worker-0"):
                await call
        await worker.close()

    run_virtual(scenario())
