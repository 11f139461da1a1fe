"""The worker: each record is what was stored, and what cannot be trained on is refused."""

import asyncio

import msgspec
import numpy as np
import pytest

from fourstroke.errors import EngineDiedError
from fourstroke.store import read_payload
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.testing.environment import FakeGrader, FakeTaskset
from fourstroke.testing.run import FakeWorker
from fourstroke.tokens import episode_rows
from fourstroke.types import Group, RefusedGroup, StopReason

SETTINGS = FakeEngineSettings(vocab_size=128, max_model_len=64)


@pytest.fixture
def roll(config, tmp_path):
    """Runs a scenario with a worker that samples on one engine."""

    def play(scenario, *, taskset, engine=None):
        async def main():
            worker = FakeWorker("worker-0", config=config, taskset=taskset, grader=FakeGrader(), payload_dir=tmp_path)
            sampler = engine or FakeEngine(SETTINGS)
            await sampler.start()
            await worker.start()
            await worker.route([sampler])
            try:
                return await scenario(worker)
            finally:
                await worker.close()

        return run_virtual(main())

    return play


@pytest.mark.parametrize("is_together", [False, True])
def test_a_record_says_of_its_group_what_is_stored(roll, assign, tmp_path, is_together):
    taskset = FakeTaskset(failing={1})
    assignments = [assign(3), assign(4, attempt=2)]

    records = roll(lambda worker: worker.run(assignments, is_together=is_together), taskset=taskset)

    for assignment, record in zip(assignments, records, strict=True):
        group = read_payload(tmp_path, record.reference, Group)
        assert (record.draw, group.draw) == (assignment.draw, assignment.draw)
        assert (record.incarnation, record.attempt) == (assignment.incarnation, assignment.attempt)
        assert record.admitted_version == group.admitted_version == assignment.admitted_version
        for kept, member in zip(record.episodes, group.members, strict=True):
            episode = member.episode
            rows = episode_rows(episode)
            lengths = tuple((row.num_tokens, row.num_loss_tokens) for row in rows)
            assert (kept.member, kept.stop, kept.verdict) == (episode.member, episode.stop, member.verdict)
            assert kept.num_sampled_tokens == episode.num_sampled_tokens
            assert tuple((row.num_tokens, row.num_loss_tokens) for row in kept.rows) == lengths
            assert kept.versions == tuple(run for span in episode.spans for run in span.versions)
    shared = [[row.num_shared_tokens for kept in record.episodes for row in kept.rows] for record in records]
    num_prompt = len(read_payload(tmp_path, records[1].reference, Group).members[0].episode.spans[0].ids)
    assert shared[1][0] == 0
    assert all(number >= num_prompt for number in shared[1][1:])
    failed = records[0].episodes[1]
    assert (failed.stop, failed.rows, failed.versions) == (StopReason.FAILED, (), ())
    assert "environment 1 fails its reset, as scripted" in failed.failure
    assert {episode.failure for episode in records[1].episodes} == {""}


def test_groups_that_share_nothing_are_the_same_together_and_alone(roll, assign, taskset, tmp_path):
    async def scenario(worker):
        assignments = [assign(index) for index in range(3)]
        together = await worker.run(assignments, is_together=True)
        alone = [record for one in assignments for record in await worker.run([one], is_together=False)]
        return together, alone

    together, alone = roll(scenario, taskset=taskset)

    for one, other in zip(together, alone, strict=True):
        ids = [
            [member.episode.spans[1].ids.tolist() for member in read_payload(tmp_path, ref, Group).members]
            for ref in (one.reference, other.reference)
        ]
        assert ids[0] == ids[1]


def test_a_group_with_a_number_that_is_none_is_refused_and_not_stored(roll, assign, taskset, tmp_path):
    class Broken(FakeEngine):
        """Gives the last token of each reply no log-probability."""

        async def generate(self, request):
            answers = await super().generate(request)
            for completion in answers:
                completion.logprobs[-1] = np.nan
            return answers

    (refusal,) = roll(
        lambda worker: worker.run([assign()], is_together=False), taskset=taskset, engine=Broken(SETTINGS)
    )

    assert isinstance(refusal, RefusedGroup)
    assert (refusal.key, refusal.reason) == ("e0000-i000003", "not_finite")
    assert "behaviour log-probability nan" in refusal.detail
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0


def test_a_refusal_keeps_its_place(roll, assign, taskset):
    message = msgspec.structs.replace(taskset.train[0].prompt[0], content="x" * 60)
    long = msgspec.structs.replace(taskset.train[1], prompt=(message,))
    assignments = [msgspec.structs.replace(assign(2), task=long), assign(1)]

    refusal, record = roll(lambda worker: worker.run(assignments, is_together=False), taskset=taskset)

    assert (refusal.key, refusal.reason) == ("e0000-i000002", "does_not_fit")
    assert record.id == "e0000-i000001"


def test_an_engines_death_passes_through(roll, assign, taskset):
    engine = FakeEngine(FakeEngineSettings(vocab_size=128, max_model_len=64, dies_at_request=0))

    with pytest.raises(EngineDiedError, match="signal 9"):
        roll(lambda worker: worker.run([assign()], is_together=False), taskset=taskset, engine=engine)


def test_it_says_what_it_waits_for(roll, assign, taskset):
    async def scenario(worker):
        running = asyncio.create_task(worker.run([assign()], is_together=False))
        await asyncio.sleep(0.02)
        waits = await worker.check_health()
        await running
        return waits, await worker.check_health()

    during, after = roll(scenario, taskset=taskset)

    assert [(wait.part, wait.what) for wait in during] == [("worker-0", "request e0000-i000003.r2.a0.m0 to be sampled")]
    assert after == ()
