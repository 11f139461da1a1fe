"""One group: requests, evidence and failures; the engine, the environments and the grader are fakes."""

import numpy as np
import pytest

from fourstroke.config import load_config
from fourstroke.errors import DataError, DoesNotFitError
from fourstroke.rollout import GroupRunner
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.testing.environment import FakeEnvironment, FakeGrader, FakeTaskset
from fourstroke.testing.run import FakeRenderer
from fourstroke.types import Draw, MaskReason, Observation, Scored, StopReason, Unscored

CONFIG = load_config({"rollout": {"max_tokens": 6}, "engine": {"max_model_len": 64}})


class RecordingEngine(FakeEngine):
    def __init__(self):
        super().__init__(FakeEngineSettings(vocab_size=128, max_model_len=64))
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        return await super().generate(request)


def _run(taskset, *, grader=None, num_samples=4, config=CONFIG, attempt=0):
    task = taskset.train[0]
    draw = Draw(epoch=0, index=3, task_id=task.id, seed=77)

    async def main():
        engine = RecordingEngine()
        await engine.start()
        runner = GroupRunner(
            config, taskset=taskset, grader=grader or FakeGrader(), engine=engine, renderer=FakeRenderer()
        )
        group = await runner.run(draw, task, num_samples=num_samples, admitted_version=5, attempt=attempt)
        return group, engine.requests

    return run_virtual(main())


def test_members_that_share_a_prompt_go_out_as_one_request():
    group, requests = _run(FakeTaskset())

    (request,) = requests
    assert request.num_samples == 4
    assert request.seed == 77
    assert request.prompt_ids.tolist() == [ord(char) for char in "Say train-0."]
    assert [member.episode.member for member in group.members] == [0, 1, 2, 3]
    assert group.admitted_version == 5
    replies = {member.episode.spans[1].ids.tobytes() for member in group.members}
    assert len(replies) > 1


def test_an_episode_holds_prompt_and_reply_with_what_the_engine_said():
    group, _ = _run(FakeTaskset(), num_samples=2)

    prompt, reply = group.members[0].episode.spans
    assert (prompt.reason, prompt.parent) == (MaskReason.PROMPT, -1)
    assert (reply.reason, reply.parent) == (MaskReason.SAMPLED, 0)
    assert len(reply.ids) == len(reply.logprobs) == sum(run.num_tokens for run in reply.versions)
    assert np.all(reply.logprobs <= 0)
    assert group.members[0].episode.reply == FakeRenderer().decode(reply.ids)


def test_a_failed_reset_takes_one_member_and_says_why():
    taskset = FakeTaskset(failing={1})
    group, requests = _run(taskset)

    assert requests[0].num_samples == 3
    failed = group.members[1]
    assert failed.episode.stop is StopReason.FAILED
    assert failed.episode.spans == ()
    assert "environment 1 fails its reset" in failed.episode.messages[0].content
    assert isinstance(failed.verdict, Unscored)
    assert [isinstance(member.verdict, Scored) for member in group.members] == [True, False, True, True]
    assert taskset.num_closed == taskset.num_opened == 4


def test_a_failed_step_keeps_the_reply_as_evidence(monkeypatch):
    async def step(self, reply):
        raise ConnectionError("the browser is gone")

    monkeypatch.setattr(FakeEnvironment, "step", step)
    group, _ = _run(FakeTaskset(), num_samples=2)

    episode = group.members[0].episode
    assert episode.stop is StopReason.FAILED
    assert [message.role for message in episode.messages] == ["assistant", "error"]
    assert "the browser is gone" in episode.messages[1].content
    assert isinstance(group.members[0].verdict, Unscored)


def test_an_environment_that_wants_a_second_turn_is_refused(monkeypatch):
    async def step(self, reply):
        return Observation(messages=(), is_final=False)

    monkeypatch.setattr(FakeEnvironment, "step", step)

    with pytest.raises(DataError, match="asks for a second turn"):
        _run(FakeTaskset())


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_sampled():
    config = load_config({"rollout": {"max_tokens": 6}, "engine": {"max_model_len": 17}})

    with pytest.raises(DoesNotFitError, match=r"prompt of 12 tokens.* 6 exceeds engine.max_model_len = 17"):
        _run(FakeTaskset(), config=config)


def test_a_second_attempt_asks_for_the_same_samples():
    (first, _), (second, requests) = _run(FakeTaskset()), _run(FakeTaskset(), attempt=1)

    assert requests[0].id == "e0000-i000003.a1.m0"
    for one, other in zip(first.members, second.members, strict=True):
        assert one.episode.spans[1].ids.tolist() == other.episode.spans[1].ids.tolist()
