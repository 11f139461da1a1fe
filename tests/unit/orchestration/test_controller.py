"""The real controller, runner and store with a fake engine, trainer and taskset, in virtual time."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourstroke.config import load_config
from fourstroke.errors import (
    ActorDiedError,
    DeadlineError,
    EngineDiedError,
    FourstrokeError,
    MismatchError,
    PublicationError,
    TooManyDropsError,
)
from fourstroke.observability import METRICS, Event, EventKind
from fourstroke.orchestration.controller import Controller, Outlets, Parts
from fourstroke.rollout import GroupRunner
from fourstroke.store import Ledger, PayloadWriter, read_payload
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.testing.environment import FakeGrader, FakeTaskset, ParityGrader
from fourstroke.testing.run import FakeRenderer
from fourstroke.testing.trainer import FakeTrainer
from fourstroke.types import Group, StopReason

SETTINGS = FakeEngineSettings(vocab_size=128, max_model_len=64)


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


def _run(tmp_path, config, *, engine=None, trainer=None, taskset=None, grader=None):
    outcome = Outcome()

    async def main():
        fake_engine = engine or FakeEngine(SETTINGS)
        fake_trainer, tasks = trainer or FakeTrainer(), taskset or FakeTaskset(num_train=6)
        runner = GroupRunner(
            config, taskset=tasks, grader=grader or ParityGrader(), engine=fake_engine, renderer=FakeRenderer()
        )
        ledger, payload = Ledger(tmp_path / "ledger.sqlite"), PayloadWriter(tmp_path)
        parts = Parts(engine=fake_engine, trainer=fake_trainer, runner=runner, ledger=ledger, payload=payload)
        outlets = Outlets(
            on_step=lambda _, record: outcome.records.append(record), on_event=outcome.events.append, origin_s=0.0
        )
        await fake_engine.start()
        with contextlib.closing(ledger), contextlib.closing(payload):
            try:
                await Controller(config, tasks=tasks.train, parts=parts, outlets=outlets).run()
            except FourstrokeError as error:
                outcome.error = error
            outcome.audit = ledger.audit()
            payload.close()
            outcome.groups = [read_payload(tmp_path, ref, Group) for ref in ledger.references().values()]
        outcome.seconds = asyncio.get_running_loop().time()

    run_virtual(main())
    return outcome


def test_three_steps_train_twelve_draws_once_each(tmp_path):
    trainer = FakeTrainer()

    outcome = _run(tmp_path, _config(), trainer=trainer)

    assert outcome.error is None
    audit = outcome.audit
    assert (audit.drawn, audit.trained, audit.dropped, audit.pending, audit.balanced) == (12, 12, 0, 0, True)
    assert trainer.published == [1, 2, 3]
    trained = [row for step in trainer.trained_rows for row in step]
    assert len(trained) == len(set(trained))
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
    trainer = FakeTrainer()
    grader = ScriptedParity(outcomes={2: ZeroDivisionError("no judge")})

    outcome = _run(tmp_path, _config(), trainer=trainer, grader=grader)

    assert outcome.error is None
    assert all(record["reward/grade/unscored_fraction"] == 0.25 for record in outcome.records)
    assert not [row for step in trainer.trained_rows for row in step if ".2/" in row]
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


def test_a_dead_engine_ends_the_run_with_its_name(tmp_path):
    engine = FakeEngine(FakeEngineSettings(vocab_size=128, max_model_len=64, dies_at_request=6))

    outcome = _run(tmp_path, _config(), engine=engine)

    assert isinstance(outcome.error, EngineDiedError)
    assert "fake-0: process 4711 ended with signal 9" in str(outcome.error)
    assert outcome.audit.balanced
    assert (outcome.audit.trained, outcome.audit.pending) == (4, 4)


def test_an_engine_that_dies_while_it_is_idle_is_named_by_the_watch(tmp_path):
    engine = FakeEngine(SETTINGS)
    trainer = FakeTrainer(verb_s=100.0)

    async def kill_later():
        await asyncio.sleep(50)
        engine.kill()

    class DyingTrainer(FakeTrainer):
        async def forward_backward(self, batch, microbatch):
            self.killer = asyncio.create_task(kill_later())
            return await trainer.forward_backward(batch, microbatch)

    outcome = _run(tmp_path, _config(), engine=engine, trainer=DyingTrainer())

    assert isinstance(outcome.error, EngineDiedError)
    assert outcome.seconds < 60  # not after the 100 s that the trainer's verb takes


def test_a_dead_trainer_ends_the_run_with_its_name(tmp_path):
    outcome = _run(tmp_path, _config(), trainer=FakeTrainer(dies_at_step=2))

    assert isinstance(outcome.error, ActorDiedError)
    assert (outcome.audit.trained, outcome.audit.pending, outcome.audit.balanced) == (4, 4, True)


def test_a_mismatch_stops_the_run_before_the_update(tmp_path):
    trainer = FakeTrainer(mismatch=0.3)

    outcome = _run(tmp_path, _config(), trainer=trainer)

    assert isinstance(outcome.error, MismatchError)
    assert "step 1" in str(outcome.error)
    assert trainer.weight == 0.0
    assert trainer.published == []


def test_weights_that_do_not_arrive_stop_the_run_before_a_token_is_sampled_from_them(tmp_path):
    class StaleTrainer(FakeTrainer):
        """Publishes version 1 again at the second step."""

        async def publish(self, number):
            return await super().publish(min(number, 1))

    engine = FakeEngine(SETTINGS)

    outcome = _run(tmp_path, _config(), engine=engine, trainer=StaleTrainer())

    assert isinstance(outcome.error, PublicationError)
    assert engine.version.number == 1
    assert len(outcome.groups) == 8  # none was sampled after the second step
    assert (outcome.audit.trained, outcome.audit.pending, outcome.audit.balanced) == (4, 4, True)


def test_a_group_that_hangs_is_named_at_its_deadline(tmp_path):
    engine = FakeEngine(FakeEngineSettings(vocab_size=128, max_model_len=64, token_s=1000.0))

    outcome = _run(tmp_path, _config(), engine=engine)

    assert isinstance(outcome.error, DeadlineError)
    assert "waited 600 s for group e0000-i00000" in str(outcome.error)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.integers(0, 80), max_size=40), st.integers(1, 4), st.integers(0, 1))
def test_the_ledger_balances_whatever_fails(tmp_path_factory, failing, groups_per_step, max_retries):
    config = _config(groups_per_step=groups_per_step, max_retries=max_retries)

    outcome = _run(tmp_path_factory.mktemp("run"), config, taskset=FakeTaskset(num_train=6, failing=failing))

    assert outcome.error is None
    audit = outcome.audit
    assert audit.balanced
    assert audit.trained == 3 * groups_per_step
    assert audit.pending == 0
    assert audit.drawn == audit.trained + audit.dropped
