"""The runner: requests, evidence and failures; the engine, the environments and the grader are fakes."""

import msgspec
import numpy as np
import pytest

from fourstroke.config import load_config
from fourstroke.errors import DataError
from fourstroke.observability import Waits
from fourstroke.rollout import GroupRunner
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.testing.environment import FakeEnvironment, FakeGrader, FakeTaskset, InlineGraders
from fourstroke.testing.run import FakeRenderer
from fourstroke.types import MaskReason, Observation, RefusedGroup, Scored, StopReason, Unscored


class RecordingEngine(FakeEngine):
    def __init__(self):
        super().__init__(FakeEngineSettings(vocab_size=128, max_model_len=64))
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        return await super().generate(request)


@pytest.fixture
def roll(config):
    """Runs assignments; the groups and the requests that the engine got."""

    def run(taskset, *assignments, grader=None, config=config, is_together=False):
        async def main():
            engine = RecordingEngine()
            await engine.start()
            runner = GroupRunner(
                config,
                taskset=taskset,
                graders=InlineGraders(grader or FakeGrader(), timeout_s=10),
                sampler=engine,
                renderer=FakeRenderer(),
                waits=Waits("worker-0"),
            )
            return await runner.run(assignments, is_together=is_together), engine.requests

        return run_virtual(main())

    return run


def _replies(group):
    return [member.episode.spans[1].ids.tolist() for member in group.members]


def test_members_that_share_a_prompt_go_out_as_one_request(roll, assign, taskset):
    (group,), (request,) = roll(taskset, assign())

    assert (request.num_samples, request.seed) == (4, 80)
    assert request.prompt_ids.tolist() == [ord(char) for char in "Say train-0."]
    assert [member.episode.member for member in group.members] == [0, 1, 2, 3]
    assert group.admitted_version == 5
    assert len({tuple(reply) for reply in _replies(group)}) > 1


def test_replies_run_to_their_full_length_where_the_end_is_ignored(roll, assign, taskset, config):
    rollout = config.rollout.model_copy(update={"ignore_eos": True})
    (group,), (request,) = roll(taskset, assign(), config=config.model_copy(update={"rollout": rollout}))

    assert request.stop_ids == ()
    assert {len(reply) for reply in _replies(group)} == {6}
    assert {member.episode.stop for member in group.members} == {StopReason.LENGTH}
    assert roll(taskset, assign())[1][0].stop_ids == FakeRenderer().stop_ids


def test_an_episode_holds_prompt_and_reply_with_what_the_engine_said(roll, assign, taskset):
    (group,), _ = roll(taskset, assign(num_samples=2))

    prompt, reply = group.members[0].episode.spans
    assert (prompt.reason, prompt.parent) == (MaskReason.PROMPT, -1)
    assert (reply.reason, reply.parent) == (MaskReason.SAMPLED, 0)
    assert len(reply.ids) == len(reply.logprobs) == sum(run.num_tokens for run in reply.versions)
    assert np.all(reply.logprobs <= 0)
    assert group.members[0].episode.reply == FakeRenderer().decode(reply.ids)


def test_a_failed_reset_takes_one_member_and_says_why(roll, assign):
    taskset = FakeTaskset(failing={1})

    (group,), (request,) = roll(taskset, assign())

    assert request.num_samples == 3
    failed = group.members[1]
    assert failed.episode.stop is StopReason.FAILED
    assert failed.episode.spans == ()
    assert "environment 1 fails its reset" in failed.episode.messages[0].content
    assert isinstance(failed.verdict, Unscored)
    assert [isinstance(member.verdict, Scored) for member in group.members] == [True, False, True, True]
    assert taskset.num_closed == taskset.num_opened == 4


@pytest.mark.parametrize("is_together", [False, True])
def test_a_group_whose_environments_all_fail_asks_for_nothing(roll, assign, is_together):
    (group,), requests = roll(FakeTaskset(failing=range(4)), assign(), is_together=is_together)

    assert requests == []
    assert {member.episode.stop for member in group.members} == {StopReason.FAILED}


def test_a_failed_step_keeps_the_reply_as_evidence(roll, assign, taskset, monkeypatch):
    async def step(self, reply):
        raise ConnectionError("the browser is gone")

    monkeypatch.setattr(FakeEnvironment, "step", step)
    (group,), _ = roll(taskset, assign(num_samples=2))

    episode = group.members[0].episode
    assert episode.stop is StopReason.FAILED
    assert [message.role for message in episode.messages] == ["assistant", "error"]
    assert "the browser is gone" in episode.messages[1].content
    assert isinstance(group.members[0].verdict, Unscored)


def test_an_environment_that_wants_a_second_turn_is_refused(roll, assign, taskset, monkeypatch):
    async def step(self, reply):
        return Observation(messages=(), is_final=False)

    monkeypatch.setattr(FakeEnvironment, "step", step)

    with pytest.raises(DataError, match="asks for a second turn"):
        roll(taskset, assign())


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_sampled(roll, assign, taskset):
    config = load_config({"rollout": {"max_tokens": 6}, "engine": {"max_model_len": 17}})

    (refusal,), requests = roll(taskset, assign(), config=config)

    assert isinstance(refusal, RefusedGroup)
    assert (refusal.key, refusal.reason) == ("e0000-i000003", "does_not_fit")
    assert "prompt of 12 tokens" in refusal.detail
    assert "6 exceeds engine.max_model_len = 17" in refusal.detail
    assert requests == []
    assert taskset.num_closed == taskset.num_opened


def test_a_second_attempt_asks_for_the_same_samples_under_another_name(roll, assign, taskset):
    (first,), (request,) = roll(taskset, assign())
    (second,), (again,) = roll(taskset, assign(attempt=1, incarnation=3))

    assert (request.id, again.id) == ("e0000-i000003.r2.a0.m0", "e0000-i000003.r3.a1.m0")
    assert _replies(first) == _replies(second)


def test_groups_together_and_alone_are_the_same(roll, assign, taskset):
    assignments = [assign(index, num_samples=index) for index in (2, 3, 4)]

    together, _ = roll(taskset, *assignments, is_together=True)
    side_by_side, _ = roll(taskset, *assignments)
    alone = [roll(taskset, assignment)[0][0] for assignment in assignments]

    assert [group.id for group in together] == [assignment.draw.key for assignment in assignments]
    assert [_replies(group) for group in together] == [_replies(group) for group in side_by_side]
    assert [_replies(group) for group in together] == [_replies(group) for group in alone]


def test_a_refusal_among_groups_together_keeps_its_place(roll, assign, taskset):
    message = msgspec.structs.replace(taskset.train[0].prompt[0], content="x" * 60)
    long = msgspec.structs.replace(taskset.train[1], prompt=(message,))

    outcomes, requests = roll(
        taskset, assign(0), msgspec.structs.replace(assign(1), task=long), assign(2), is_together=True
    )

    assert [isinstance(outcome, RefusedGroup) for outcome in outcomes] == [False, True, False]
    assert [outcome.id for outcome in (outcomes[0], outcomes[2])] == ["e0000-i000000", "e0000-i000002"]
    assert len(requests) == 2
