"""Whole runs on fakes in virtual time: evaluations, deaths, resumes, interrupts, and what is written at the end."""

import asyncio
import os

import pytest

from fourstroke.config import load_config, process_settings
from fourstroke.errors import (
    ActorDiedError,
    ConfigError,
    DeadlineError,
    InterruptedRunError,
    MismatchError,
)
from fourstroke.observability import EventKind, utc_now
from fourstroke.orchestration import training_run
from fourstroke.orchestration.training_run import (
    TrainingRun,
    load_tasks,
    prepare_resume,
    publication_path,
    summary_lines,
    sweep_shared_memory,
)
from fourstroke.store import RunFolder, RunStatus, read_events, read_metrics, read_summary, read_waits
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngineSettings
from fourstroke.testing.environment import FakeTaskset, ParityGrader
from fourstroke.testing.run import FakeParts, SilentReporter, prepared_on_fakes
from fourstroke.testing.trainer import FakeTrainer


@pytest.fixture
def config(tmp_path):
    return load_config(
        {
            "num_steps": 3,
            "runs_dir": str(tmp_path / "runs"),
            "rollout": {"groups_per_step": 2, "group_size": 4, "max_tokens": 8},
            "evaluation": {"samples_per_task": 2},
            "checkpoint": {"every_steps": 1},
            "engine": {"max_model_len": 64},
            "trainer": {"microbatch_tokens": 64},
        }
    )


class Scene:
    """One life of a run in its folder."""

    def __init__(self, config, *, path=None, trainers=(), parts=None):
        self.folder = RunFolder.resume(path, config) if path else RunFolder.create(config, now=utc_now())
        self.reporter, self.error, self.summary = SilentReporter(), None, None
        taskset = FakeTaskset(num_train=6)
        settings = FakeEngineSettings(vocab_size=128, max_model_len=64)
        self.parts = parts or FakeParts(taskset=taskset, grader=ParityGrader(), engine=settings, trainers=trainers)
        self._run = TrainingRun(
            prepared_on_fakes(self.folder, config, taskset=taskset),
            reporter=self.reporter,
            makers=self.parts,
            root_pid=os.getpid(),
        )

    def play(self, meanwhile=None):
        """The run to its end, with a coroutine function of the running task beside it."""

        async def main():
            running = asyncio.ensure_future(self._run.run())
            beside = asyncio.ensure_future(meanwhile(running)) if meanwhile else None
            try:
                return await running
            finally:
                if beside:
                    await beside

        try:
            run_virtual(main())
        except Exception as error:  # noqa: BLE001 - every end is looked at
            self.error = error
        self.folder.close()
        self.summary = read_summary(self.folder.summary_path)
        return self

    @property
    def events(self):
        return read_events(self.folder.events_path)

    def told(self, kind):
        return [event.fields for event in self.events if event.kind is kind]

    @property
    def steps(self):
        return [record["step"] for record in read_metrics(self.folder.metrics_path)]

    @property
    def all_are_closed(self):
        return all(trainer.is_closed for trainer in self.parts.made_trainers) and all(
            engine._obituary for engine in self.parts.engines.values()
        )


def test_a_run_is_evaluated_before_and_after_and_leaves_all_that_it_promises(config):
    scene = Scene(config).play()

    assert scene.error is None
    assert scene.reporter.phases == ["start engine and trainer", "evaluate before", "train", "evaluate after"]
    summary = scene.summary
    assert (summary.status, summary.reason, summary.num_steps) == (RunStatus.FINISHED, "", 3)
    assert summary.before.num_tasks == summary.after.num_tasks == 4
    assert [(fields["name"], fields["version"]) for fields in scene.told(EventKind.EVALUATED)] == [
        ("before", 0),
        ("after", 3),
    ]
    assert scene.steps == [1, 2, 3]
    folder = scene.folder
    assert folder.curves_path.stat().st_size > 0
    assert sorted(path.name for path in folder.evaluations_dir.iterdir()) == ["after.json", "before.json"]
    assert [path.name for path in folder.models()] == ["step-000003"]
    assert sorted(path.name for path in folder.checkpoints_dir.iterdir()) == ["step-000002", "step-000003"]
    assert scene.events[0].kind is EventKind.RUN_STARTED
    assert scene.events[-1].fields == {"status": "finished", "reason": ""}
    assert scene.all_are_closed


def test_a_run_without_evaluations_has_none(config):
    config = load_config(config, overrides=["evaluation.before=false", "evaluation.after=false"])

    scene = Scene(config).play()

    assert (scene.summary.before, scene.summary.after, scene.summary.num_steps) == (None, None, 3)
    assert scene.reporter.phases == ["start engine and trainer", "train"]


def test_a_dead_trainer_is_replaced_and_the_next_incarnation_goes_on_from_its_checkpoint(config):
    scene = Scene(config, trainers=[FakeTrainer(dies_at_step=3)]).play()

    assert scene.error is None
    assert (scene.summary.status, scene.summary.num_steps) == (RunStatus.FINISHED, 3)
    first, second = scene.parts.made_trainers
    assert first.published == [(0, 1), (0, 2)]
    assert second.published == [(1, 2), (1, 3)]
    assert scene.steps == [1, 2, 3]
    rows = [row for update in second.trained for row in update]
    assert len(rows) == len(set(rows)) > 0
    opened = [(fields["incarnation"], fields["step"]) for fields in scene.told(EventKind.INCARNATION_OPENED)]
    assert opened == [(0, 0), (1, 2)]
    assert [fields["fault"] for fields in scene.told(EventKind.FAULT)] == ["trainer_died"]
    assert scene.told(EventKind.PART_REPLACED) == [{"part": "trainer", "successor": "trainer"}]
    assert any("going on from the newest checkpoint" in note for note in scene.reporter.notes)
    assert scene.all_are_closed


def test_a_trainer_that_dies_over_and_over_stops_the_run_with_its_name(config):
    scene = Scene(config, trainers=[FakeTrainer(dies_at_step=2) for _ in range(9)]).play()

    assert isinstance(scene.error, ActorDiedError)
    assert len(scene.parts.made_trainers) == 1 + config.supervision.max_replacements
    assert (scene.summary.status, scene.summary.num_steps) == (RunStatus.FAILED, 1)
    assert "trainer (process 1) is gone: signal 9" in scene.summary.reason
    assert scene.all_are_closed


def test_a_failure_is_told_in_the_summary(config):
    scene = Scene(config, trainers=[FakeTrainer(mismatch=0.3)]).play()

    assert isinstance(scene.error, MismatchError)
    assert (scene.summary.status, scene.summary.reason) == (RunStatus.FAILED, str(scene.error))
    assert scene.summary.num_steps == 0
    assert scene.summary.before is not None
    assert scene.summary.after is None
    assert scene.events[-1].fields["status"] == "failed"
    assert not scene.folder.curves_path.exists()  # no step, no curve
    assert scene.all_are_closed


def test_an_error_that_is_not_of_ours_is_told_too(config):
    class Broken(FakeTrainer):
        async def optim_step(self):
            raise ZeroDivisionError("division by zero")

    scene = Scene(config, trainers=[Broken()]).play()

    assert isinstance(scene.error, ZeroDivisionError)
    assert scene.summary.status is RunStatus.FAILED
    assert "not of Fourstroke's own" in scene.summary.reason
    assert scene.all_are_closed


@pytest.mark.parametrize("after_s", [0.5, 1.2, 6.0])
def test_an_interrupt_ends_the_run_cleanly_wherever_it_is(config, after_s):
    async def interrupt(running):
        await asyncio.sleep(after_s)
        running.cancel()

    scene = Scene(config).play(interrupt)

    assert isinstance(scene.error, InterruptedRunError)
    assert str(scene.error) == f"stopped; go on with: fourstroke resume {scene.folder.path}"
    assert (scene.summary.status, scene.summary.reason) == (RunStatus.INTERRUPTED, "stopped by the user")
    assert scene.all_are_closed


def test_a_part_that_does_not_start_is_named_and_the_others_are_ended(config):
    class Stuck(FakeTrainer):
        async def start(self):
            await asyncio.Event().wait()

    config = load_config(config, overrides=["deadlines.start_s=30"])
    scene = Scene(config, trainers=[Stuck()]).play()

    assert isinstance(scene.error, DeadlineError)
    assert "waited 30 s for engines, trainer and workers to start" in scene.summary.reason
    assert scene.all_are_closed


# --- resuming -------------------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_where_its_checkpoint_is(config):
    first = Scene(config, trainers=[FakeTrainer(dies_at_step=3) for _ in range(4)]).play()
    before = (first.folder.evaluations_dir / "before.json").read_bytes()
    second = Scene(config, path=first.folder.path).play()

    assert isinstance(first.error, ActorDiedError)
    assert second.error is None
    assert second.reporter.phases == ["start engine and trainer", "train", "evaluate after"]
    assert (first.folder.evaluations_dir / "before.json").read_bytes() == before
    assert second.summary.before == first.summary.before
    assert (second.summary.status, second.summary.num_steps) == (RunStatus.FINISHED, 3)
    assert second.steps == [1, 2, 3]
    (trainer,) = second.parts.made_trainers
    assert trainer.published[0] == (4, 2)  # the first life had incarnations 0 to 3
    assert second.told(EventKind.INCARNATION_OPENED)[-1]["reason"] == "resumed"


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_again(config):
    async def interrupt(running):
        await asyncio.sleep(1.2)
        running.cancel()

    first = Scene(config).play(interrupt)
    second = Scene(config, path=first.folder.path).play()

    assert first.summary.num_steps == 0
    assert (second.summary.status, second.steps) == (RunStatus.FINISHED, [1, 2, 3])


def test_a_finished_run_goes_on_with_more_steps(config):
    first = Scene(config).play()
    longer = load_config(config, overrides=["num_steps=5"])
    second = Scene(longer, path=first.folder.path).play()

    assert second.error is None
    assert (second.summary.num_steps, second.steps) == (5, [1, 2, 3, 4, 5])
    assert [path.name for path in second.folder.models()] == ["step-000003", "step-000005"]
    assert [fields["version"] for fields in second.told(EventKind.EVALUATED)] == [0, 3, 5]
    assert load_config(second.folder.config_path).num_steps == 5


def test_a_finished_run_that_is_resumed_has_nothing_to_train_and_says_so(config):
    first = Scene(config).play()
    second = Scene(config, path=first.folder.path).play()

    assert second.error is None
    assert (second.summary.status, second.summary.num_steps) == (RunStatus.FINISHED, 3)
    (trainer,) = second.parts.made_trainers
    assert trainer.published == [(1, 3)]
    assert trainer.exported == []


def test_a_run_does_not_go_back_behind_its_checkpoint(config, monkeypatch):
    first = Scene(config).play()
    monkeypatch.setattr(training_run, "_checked", lambda config, settings: (FakeTaskset(), first.folder.path))

    with pytest.raises(ConfigError, match="num_steps = 2 lies before step 3, whose checkpoint"):
        prepare_resume(first.folder.path, load_config(config, overrides=["num_steps=2"]), settings=process_settings())

    assert load_config(first.folder.config_path).num_steps == 3
    prepare_resume(first.folder.path, config, settings=process_settings()).folder.close()


# --- waits ----------------------------------------------------------------------------------------------------------


def test_what_every_part_waits_for_is_written_down_each_second(config):
    reports = []

    async def look(running):
        while not running.done():
            await asyncio.sleep(1.25)
            if scene.folder.waits_path.exists():
                reports.append(read_waits(scene.folder.waits_path))

    scene = Scene(config, trainers=[FakeTrainer(verb_s=5.0)])
    scene.play(look)

    assert {report.pid for report in reports} == {os.getpid()}
    assert "train" in {report.phase for report in reports}
    assert {report.step for report in reports} == {0, 1, 2, 3}
    whats = {wait.what for report in reports for wait in report.waits}
    assert "a forward and backward pass of step 1" in whats
    assert "the weights of step 2 to land" in whats
    assert "the trained model to be exported" in whats
    parts = {wait.part for report in reports for wait in report.waits}
    assert parts >= {"controller", "run"}


# --- before anything starts -----------------------------------------------------------------------------------------


def test_tasks_are_loaded_and_refused_before_anything_starts():
    def refused(*overrides):
        with pytest.raises(ConfigError) as caught:
            load_tasks(load_config({}, overrides=overrides))
        return str(caught.value)

    few = "tasks.use=fourstroke.testing.environment:FakeTaskset"
    assert len(load_tasks(load_config({}, overrides=[few])).train) == 8
    assert "gives no training task" in refused(few, "tasks.arguments={num_train: 0}")
    assert "holds out 1 tasks, too few for an interval" in refused(few, "tasks.arguments={num_held_out: 1}")
    assert "cannot be imported" in refused("grader.use=nowhere:grader")
    off = ["evaluation.before=false", "evaluation.after=false"]
    load_tasks(load_config({}, overrides=[few, "tasks.arguments={num_held_out: 0}", *off]))


def test_memory_of_runs_that_were_killed_is_taken_back(tmp_path):
    mine = publication_path(tmp_path, pid=os.getpid())
    dead = publication_path(tmp_path, pid=2**22 + 1)  # above the kernel's largest process id
    other = tmp_path / "fourstroke-weights-mine"
    for path in (mine, dead, other):
        path.write_text("")

    sweep_shared_memory(tmp_path)

    assert sorted(tmp_path.iterdir()) == sorted([mine, other])


def test_the_summary_for_a_person(config):
    scene = Scene(config).play()

    lines = dict(summary_lines(scene.summary, curves=scene.folder.curves_path))

    assert list(lines) == [
        "run",
        "held-out before",
        "held-out after",
        "training",
        "in all",
        "peak memory",
        "picture",
    ]
    assert lines["run"] == "run, finished, 3 steps"
    assert lines["held-out before"].endswith("4 tasks, 8 samples")
