"""The real controller, runner and store with a fake engine, trainer and taskset, in virtual time."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourstroke.config import load_config
from fourstroke.errors import (
    ActorDiedError,
    DataError,
    EngineDiedError,
    FourstrokeError,
    MismatchError,
    PublicationError,
    TooManyDropsError,
)
from fourstroke.observability import METRICS, Event, EventKind
from fourstroke.store import read_payload
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.testing.environment import FakeGrader, FakeTaskset, ParityGrader
from fourstroke.testing.run import FakeParts, FakeRun
from fourstroke.testing.trainer import FakeTrainer
from fourstroke.types import Group, StopReason


class ScriptedParity(FakeGrader):
    """Scores by parity, so that most groups are mixed, unless the script says otherwise."""

    async def grade(self, task, episode):
        if episode.member in self._outcomes:
            return await super().grade(task, episode)
        return await ParityGrader().grade(task, episode)


def _config(**rollout):
    return load_config(
        {
            "num_steps": 3,
            "rollout": {"groups_per_step": 4, "group_size": 4, "max_tokens": 8, **rollout},
            "engine": {"max_model_len": 64},
            "trainer": {"microbatch_tokens": 64},
        }
    )


@dataclass
class Outcome:
    error: BaseException | None = None
    records: list[dict[str, float]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    audit: object = None
    groups: list[Group] = field(default_factory=list)
    seconds: float = 0.0
    parts: FakeParts | None = None

    @property
    def trained(self) -> list[str]:
        """Rows that went into the weights, update by update."""
        return [row for update in self.parts.made_trainers[-1].trained for row in update]

    @property
    def published(self) -> list[tuple[int, int]]:
        return self.parts.made_trainers[-1].published


def _run(tmp_path, config, *, engine=None, trainers=(), taskset=None, grader=None, meanwhile=None):
    """One incarnation; ``meanwhile`` is a coroutine function of the run's parts that goes on beside it."""
    outcome = Outcome()

    async def main():
        tasks = taskset or FakeTaskset(num_train=6)
        parts = FakeParts(taskset=tasks, grader=grader or ParityGrader(), engine=engine, trainers=trainers)
        run = FakeRun(
            config,
            tmp_path,
            parts=parts,
            on_step=lambda _, record: outcome.records.append(record),
            on_event=outcome.events.append,
        )
        outcome.parts = parts
        async with run.started():
            beside = asyncio.ensure_future(meanwhile(parts)) if meanwhile else None
            try:
                await run.train(tasks.train)
            except FourstrokeError as error:
                outcome.error = error
            finally:
                outcome.seconds = asyncio.get_running_loop().time()
                if beside:
                    beside.cancel()
            outcome.audit = run.ledger.audit()
            references = run.ledger.references().values()
            outcome.groups = [read_payload(tmp_path / "payload", reference, Group) for reference in references]

    run_virtual(main())
    return outcome


def test_three_steps_train_twelve_draws_once_each(tmp_path):
    outcome = _run(tmp_path, _config())

    assert outcome.error is None
    audit = outcome.audit
    assert (audit.drawn, audit.trained, audit.dropped, audit.pending, audit.balanced) == (12, 12, 0, 0, True)
    assert (audit.attempts, audit.attempts_used, audit.late, audit.max_lag) == (12, 12, 0, 0)
    assert outcome.published == [(0, 1), (0, 2), (0, 3)]
    assert len(outcome.trained) == len(set(outcome.trained)) > 0
    assert [record["step"] for record in outcome.records] == [1, 2, 3]


def test_a_steps_groups_are_sampled_at_the_version_that_they_train(tmp_path):
    outcome = _run(tmp_path, _config())

    assert all(record["train/staleness/lag_max"] == 0 for record in outcome.records)
    by_version = [group.admitted_version for group in outcome.groups]
    assert by_version == [0] * 4 + [1] * 4 + [2] * 4
    for group in outcome.groups:
        for member in group.members:
            assert {run.version for run in member.episode.spans[-1].versions} == {group.admitted_version}


def test_two_runs_agree_in_everything(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = _run(tmp_path / "a", _config()), _run(tmp_path / "b", _config())

    assert first.records == second.records
    assert first.events == second.events
    assert first.seconds == second.seconds


def test_each_metric_of_the_catalogue_is_fed(tmp_path):
    outcome = _run(tmp_path, _config())

    assert {name for record in outcome.records for name in record} == {"step", *METRICS}


def test_members_without_a_score_are_left_out_and_counted(tmp_path):
    grader = ScriptedParity(outcomes={2: ZeroDivisionError("no judge")})

    outcome = _run(tmp_path, _config(), grader=grader)

    assert outcome.error is None
    assert all(record["reward/grade/unscored_fraction"] == 0.25 for record in outcome.records)
    assert not [row for row in outcome.trained if ".2/" in row]
    unscored = [event for event in outcome.events if event.kind is EventKind.EPISODE_UNSCORED]
    assert len(unscored) == 12
    assert "no judge" in unscored[0].fields["detail"]


def test_a_group_with_too_few_scores_is_rolled_again_then_replaced(tmp_path):
    # The first group's environments fail at both attempts: 0..3 at the first, and the next four that are opened.
    taskset = FakeTaskset(num_train=6, failing=set(range(4)) | set(range(16, 20)), latency_s=0.0)

    outcome = _run(tmp_path, _config(), taskset=taskset)

    assert outcome.error is None
    assert (outcome.audit.drawn, outcome.audit.trained, outcome.audit.dropped) == (13, 12, 1)
    assert outcome.audit.dropped_by_reason == {"too_few_scored": 1}
    assert sum(event.kind is EventKind.GROUP_RETRIED for event in outcome.events) == 1
    failed = [event for event in outcome.events if event.kind is EventKind.EPISODE_FAILED]
    assert len(failed) == 8
    assert "environment 0 fails its reset, as scripted" in failed[0].fields["detail"]
    assert taskset.num_opened == taskset.num_closed


def test_a_retry_that_succeeds_drops_nothing(tmp_path):
    taskset = FakeTaskset(num_train=6, failing=set(range(3)))

    outcome = _run(tmp_path, _config(), taskset=taskset)

    assert (outcome.audit.drawn, outcome.audit.trained, outcome.audit.dropped) == (12, 12, 0)
    first = next(group for group in outcome.groups if group.draw.index == 0 and group.draw.epoch == 0)
    assert {member.episode.attempt for member in first.members} == {1}
    assert all(member.episode.stop is not StopReason.FAILED for member in first.members)


def test_a_task_that_does_not_fit_is_dropped_with_its_id_and_reason(tmp_path):
    config = _config(max_tokens=53)  # "Say train-0." has 12 tokens, and 12 + 53 > 64

    outcome = _run(tmp_path, config)

    assert isinstance(outcome.error, TooManyDropsError)
    refused = [event for event in outcome.events if event.kind is EventKind.TASK_REFUSED]
    assert "prompt of 12 tokens" in refused[0].fields["reason"]
    assert refused[0].fields["task"] in refused[0].fields["reason"]
    assert outcome.audit.balanced
    assert outcome.audit.dropped_by_reason["does_not_fit"] >= 31


def test_a_grader_that_always_fails_stops_the_run_loudly(tmp_path):
    grader = FakeGrader(outcomes={member: ZeroDivisionError("no judge") for member in range(4)})

    outcome = _run(tmp_path, _config(max_drops_in_a_row=5), grader=grader)

    assert isinstance(outcome.error, TooManyDropsError)
    assert "5 draws in a row were dropped" in str(outcome.error)
    assert outcome.audit.balanced
    assert outcome.audit.trained == 0


def test_a_dead_engine_is_replaced_and_what_it_lost_is_rolled_again(tmp_path):
    engine = FakeEngineSettings(vocab_size=128, max_model_len=64, dies_at_request=6)

    outcome = _run(tmp_path, _config(), engine=engine)

    assert outcome.error is None
    assert (outcome.audit.trained, outcome.audit.dropped, outcome.audit.balanced) == (12, 0, True)
    assert outcome.audit.attempts_dropped_by_reason == {"lost": 4}
    # The successor was brought to the weights of step 1 before it served.
    engines = {member.episode.spans[-1].engine for group in outcome.groups for member in group.members}
    assert engines == {"vllm-0", "vllm-1"}
    for group in outcome.groups:
        for member in group.members:
            assert {run.version for run in member.episode.spans[-1].versions} == {group.admitted_version}


def test_an_engine_that_dies_over_and_over_stops_the_run_with_its_name(tmp_path):
    async def kill_all(parts):
        while True:
            await asyncio.sleep(5)
            for engine in parts.engines.values():
                engine.kill()

    outcome = _run(tmp_path, _config(), meanwhile=kill_all)

    assert isinstance(outcome.error, EngineDiedError)
    assert "process 4711 ended with signal 9" in str(outcome.error)
    assert outcome.audit.balanced


def test_an_engine_that_dies_while_it_is_idle_is_replaced_while_the_trainer_works(tmp_path):
    async def kill_later(parts):
        await asyncio.sleep(50)
        parts.engines["vllm-0"].kill()
        await asyncio.sleep(2)
        kill_later.engines = list(parts.engines)

    outcome = _run(tmp_path, _config(), trainers=[FakeTrainer(verb_s=100.0)], meanwhile=kill_later)

    assert outcome.error is None
    assert kill_later.engines == ["vllm-0", "vllm-1"]  # within 2 s, not after the 100 s of the trainer's verb
    assert outcome.audit.trained == 12


def test_a_dead_worker_is_replaced_and_what_it_lost_is_rolled_again(tmp_path):
    async def kill_later(parts):
        while not any(engine.num_running for engine in parts.engines.values()):  # noqa: ASYNC110 (virtual time)
            await asyncio.sleep(0.01)
        parts.made_workers["worker-0"].kill()

    outcome = _run(tmp_path, _config(), meanwhile=kill_later)

    assert outcome.error is None
    assert list(outcome.parts.made_workers) == ["worker-0", "worker-1"]
    assert (outcome.audit.trained, outcome.audit.dropped, outcome.audit.balanced) == (12, 0, True)
    assert outcome.audit.attempts_dropped_by_reason == {"lost": 4}


def test_a_dead_trainer_ends_the_incarnation_with_its_name(tmp_path):
    outcome = _run(tmp_path, _config(), trainers=[FakeTrainer(dies_at_step=2)])

    assert isinstance(outcome.error, ActorDiedError)
    assert (outcome.audit.trained, outcome.audit.pending, outcome.audit.balanced) == (4, 4, True)


def test_a_run_goes_on_from_its_checkpoint_and_trains_each_draw_once(tmp_path):
    config = _config(staleness=1)
    config = load_config(config, overrides=["checkpoint.every_steps=1", "num_steps=4"])

    first = _run(tmp_path, config, trainers=[FakeTrainer(dies_at_step=3)])
    second = _run(tmp_path, config)

    assert isinstance(first.error, ActorDiedError)
    assert second.error is None
    assert [record["step"] for record in second.records] == [3, 4]
    assert second.published == [(1, 2), (1, 3), (1, 4)]
    groups = {row.partition(".")[0] for row in second.trained}
    assert len(second.trained) == len(set(second.trained))
    assert (second.audit.drawn, second.audit.trained, second.audit.pending, second.audit.balanced) == (16, 16, 0, True)
    assert groups <= {f"e{i // 6:04d}-i{i % 6:06d}" for i in range(16)}
    assert any(event.kind is EventKind.GROUP_REUSED for event in second.events)
    assert second.audit.max_lag <= 1


def test_tasks_that_changed_between_two_lives_are_told(tmp_path):
    first = _run(tmp_path, _config(), trainers=[FakeTrainer(dies_at_step=1)])
    second = _run(tmp_path, _config(), taskset=FakeTaskset(num_train=1))

    assert isinstance(first.error, ActorDiedError)
    assert isinstance(second.error, DataError)
    assert "which tasks.use gives no more" in str(second.error)
    assert second.audit.balanced


def test_a_late_group_is_tried_again_and_the_first_result_counts(tmp_path):
    class SlowOnce(ParityGrader):
        """The first episodes take longer than a group may."""

        num_calls = 0

        async def grade(self, task, episode):
            SlowOnce.num_calls += 1
            if SlowOnce.num_calls <= 4:
                await asyncio.sleep(25)
            return await super().grade(task, episode)

    config = load_config(_config(), overrides=["deadlines.group_s=10"])

    outcome = _run(tmp_path, config, grader=SlowOnce())

    assert outcome.error is None
    assert (outcome.audit.trained, outcome.audit.dropped, outcome.audit.attempts) == (12, 0, 13)
    assert outcome.audit.attempts_dropped_by_reason == {"overtaken": 1}
    assert [event.fields["fault"] for event in outcome.events if event.kind is EventKind.FAULT] == ["group_late"]


def test_deterministic_groups_are_sampled_together(tmp_path, monkeypatch):
    sizes, plain = [], FakeEngine.generate_together

    async def counted(self, requests):
        sizes.append(len(requests))
        return await plain(self, requests)

    monkeypatch.setattr(FakeEngine, "generate_together", counted)
    config = load_config(_config(), overrides=["deterministic=true"])
    # The first attempt of the second group fails: it is rolled again in a batch of its own.
    taskset = FakeTaskset(num_train=6, failing={4, 5, 6})

    outcome = _run(tmp_path, config, taskset=taskset)

    assert outcome.error is None
    assert (outcome.audit.trained, outcome.audit.dropped, outcome.audit.attempts) == (12, 0, 13)
    assert sizes == [4, 1, 4, 4]


def test_a_mismatch_stops_the_run_before_the_update(tmp_path):
    trainer = FakeTrainer(mismatch=0.3)

    outcome = _run(tmp_path, _config(), trainers=[trainer])

    assert isinstance(outcome.error, MismatchError)
    assert "step 1" in str(outcome.error)
    assert trainer.weight == 0.0
    assert trainer.published == []


def test_weights_that_do_not_arrive_stop_the_run_before_a_token_is_sampled_from_them(tmp_path):
    class StaleTrainer(FakeTrainer):
        """Publishes version 1 again at the second step."""

        async def publish(self, number, *, incarnation):
            return await super().publish(min(number, 1), incarnation=incarnation)

    outcome = _run(tmp_path, _config(), trainers=[StaleTrainer()])

    assert isinstance(outcome.error, PublicationError)
    assert outcome.parts.engines["vllm-0"].version.number == 1
    assert len(outcome.groups) == 8  # none was sampled after the second step
    assert (outcome.audit.trained, outcome.audit.pending, outcome.audit.balanced) == (4, 4, True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    staleness=st.integers(0, 3),
    window=st.integers(1, 8),
    groups_per_step=st.integers(1, 4),
    latencies=st.lists(st.floats(0.0, 60.0), min_size=1, max_size=7),
)
def test_no_lag_passes_the_bound_whatever_the_latencies(
    tmp_path_factory, staleness, window, groups_per_step, latencies
):
    class AdversarialGrader(ParityGrader):
        """Holds back each episode for as long as the script says."""

        num_calls = 0

        async def grade(self, task, episode):
            AdversarialGrader.num_calls += 1
            await asyncio.sleep(latencies[AdversarialGrader.num_calls % len(latencies)])
            return await super().grade(task, episode)

    window = min(window, staleness * groups_per_step + 1)
    sizes = {"staleness": staleness, "window": window, "groups_per_step": groups_per_step, "group_size": 2}
    config = load_config(_config(**sizes), overrides=["num_steps=6", "deadlines.grade_s=100"])

    outcome = _run(tmp_path_factory.mktemp("run"), config, grader=AdversarialGrader())

    assert outcome.error is None
    assert outcome.audit.max_lag <= staleness
    assert "stale" not in outcome.audit.dropped_by_reason  # the second check finds nothing
    assert (outcome.audit.trained, outcome.audit.pending) == (6 * groups_per_step, 0)
    assert len(outcome.trained) == len(set(outcome.trained))


# --- the canary -----------------------------------------------------------------------------------------------------


def test_an_engine_that_loaded_other_weights_stops_the_run_before_a_token_is_sampled(tmp_path):
    """The publication arrived whole and was acknowledged; what the engine computes with is that of the step before."""
    reference = FakeEngine(FakeEngineSettings(vocab_size=128, max_model_len=64))
    ids = np.array([[1, 2, 3, 4]], dtype=np.int32)
    trainer = FakeTrainer(canary=lambda version: reference.scored(ids, version=version if version < 2 else version + 7))

    outcome = _run(tmp_path, _config(), trainers=[trainer])

    assert isinstance(outcome.error, MismatchError)
    assert "vllm-0 took weights 0.2-" in str(outcome.error)
    assert {group.admitted_version for group in outcome.groups} == {0, 1}
    assert (outcome.audit.trained, outcome.audit.balanced) == (4, True)
