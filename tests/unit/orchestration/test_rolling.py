"""The roller on scripted attempts: late, lost, badly scored, refused and doubled results, each counted once."""

import asyncio
import contextlib

import msgspec
import pytest

from fourstroke.config import load_config
from fourstroke.errors import ActorDiedError, DataError, EngineDiedError
from fourstroke.observability import EventKind, Waits
from fourstroke.orchestration.rolling import Admitted, Dropped, Roller
from fourstroke.orchestration.supervision import Supervisor
from fourstroke.store import Ledger
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.types import Draw, RefusedGroup, Task

CONFIG = load_config(
    {
        "rollout": {"group_size": 2, "max_retries": 1},
        "supervision": {"max_attempts": 3},
        "deadlines": {"group_s": 10},
    }
)
GOOD, POOR = [1.0, 0.0], [1.0, None]


class Script:
    """A pool whose n-th attempt at a draw takes so long and then gives scores, a refusal or an error."""

    def __init__(self, **attempts):
        self.attempts = attempts
        self.asked = []
        self.num_cancelled = 0

    async def run(self, assignments, *, is_together):
        self.asked.append([assignment.name for assignment in assignments])
        steps = [self.attempts[f"draw_{one.draw.index}"][one.attempt] for one in assignments]
        try:
            await asyncio.sleep(max(seconds for seconds, _ in steps))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return tuple(self._answer(one, outcome) for one, (_, outcome) in zip(assignments, steps, strict=True))

    def _answer(self, assignment, outcome):
        if isinstance(outcome, BaseException):
            raise outcome
        if isinstance(outcome, str):
            return RefusedGroup(key=assignment.draw.key, reason=outcome, detail=f"refused: {outcome}")
        group = make_group(outcome, index=assignment.draw.index, version=assignment.admitted_version)
        return make_record(group, incarnation=assignment.incarnation, attempt=assignment.attempt)


class Scene:
    """A roller with a real ledger in which two draws are admitted."""

    def __init__(self, ledger, script):
        self.events, self.records = [], []
        self.ledger, self.script = ledger, script
        incarnation = ledger.open_incarnation(from_step=0, reason="test")
        self.admitted = [self._admit(index) for index in range(2)]
        self.roller = Roller(
            CONFIG,
            workers=script,
            ledger=ledger,
            supervisor=Supervisor(CONFIG.supervision),
            incarnation=incarnation,
            waits=Waits("controller"),
            tell=lambda kind, **fields: self.events.append((kind, fields)),
            on_record=self.records.append,
        )

    def _admit(self, index):
        draw = Draw(epoch=0, index=index, task_id=f"task-{index}", seed=index)
        self.ledger.admit(draw, version=3)
        return Admitted(draw, Task(id=draw.task_id, prompt=(), answer=""), 3)

    @property
    def kinds(self):
        return [kind for kind, _ in self.events]


@pytest.fixture
def play(tmp_path):
    """Rolls one draw by a script: its outcome, the scene and its end's time."""

    def rolled(*attempts):
        async def main():
            with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
                scene = Scene(ledger, Script(draw_0=attempts))
                outcome = await scene.roller.roll(scene.admitted[0])
                scene.audit, scene.seconds = ledger.audit(), asyncio.get_running_loop().time()
                return outcome, scene

        return run_virtual(main())

    return rolled


def test_a_group_in_time_is_stored(play):
    outcome, scene = play((5, GOOD))

    assert outcome == scene.records[0]
    assert (outcome.attempt, outcome.admitted_version) == (0, 3)
    assert (scene.audit.attempts, scene.audit.attempts_pending) == (1, 1)
    assert scene.kinds == []


def test_a_late_attempt_goes_on_beside_its_successor_and_may_still_win(play):
    outcome, scene = play((15, GOOD), (9, GOOD))

    assert outcome.attempt == 0  # at 15 s; the second would have come at 19 s
    assert scene.seconds == 15
    assert scene.script.num_cancelled == 1
    assert scene.audit.attempts_dropped_by_reason == {"overtaken": 1}
    assert scene.kinds == [EventKind.FAULT]
    assert scene.events[0][1]["reason"] == "waited 10 s for e0000-i000000, attempt 0"


def test_the_successor_of_a_late_attempt_may_win(play):
    outcome, scene = play((3600, GOOD), (5, GOOD))

    assert (outcome.attempt, scene.seconds) == (1, 15)
    assert scene.script.num_cancelled == 1
    assert scene.audit.attempts_dropped_by_reason == {"overtaken": 1}


def test_of_two_results_at_one_instant_one_is_taken(play):
    outcome, scene = play((15, GOOD), (5, GOOD))

    assert outcome.attempt == 0
    assert len(scene.records) == 1
    assert (scene.audit.attempts_pending, scene.audit.attempts_dropped_by_reason) == (1, {"overtaken": 1})


def test_a_draw_whose_attempts_are_all_late_is_dropped(play):
    outcome, scene = play(*[(3600, GOOD)] * 3)

    assert (outcome, scene.seconds) == (Dropped("late"), 30)
    assert scene.script.num_cancelled == 3
    assert scene.audit.attempts_dropped_by_reason == {"overtaken": 3}


@pytest.mark.parametrize("error", [EngineDiedError("vllm-0 is gone"), ActorDiedError("worker-0 is gone")])
def test_what_a_dead_part_lost_is_tried_again(play, error):
    outcome, scene = play((5, error), (5, GOOD))

    assert (outcome.attempt, scene.seconds) == (1, 10)
    assert scene.audit.attempts_dropped_by_reason == {"lost": 1}
    assert scene.events == [(EventKind.FAULT, {"fault": "group_lost", "group": "e0000-i000000", "reason": str(error)})]


def test_a_draw_that_is_lost_over_and_over_is_dropped(play):
    outcome, scene = play(*[(5, EngineDiedError("gone"))] * 3)

    assert outcome == Dropped("lost")
    assert scene.audit.attempts_dropped_by_reason == {"lost": 3}


def test_late_and_lost_attempts_count_together(play):
    outcome, scene = play((12, EngineDiedError("gone")), (3600, GOOD), (3600, GOOD))

    # Late at 10 s, lost at 12 s, late again at 22 s: three tries.
    assert (outcome, scene.seconds) == (Dropped("late"), 22)


def test_too_few_scores_are_tried_again_so_often(play):
    outcome, scene = play((5, POOR), (5, POOR))

    assert outcome == Dropped("too_few_scored")
    assert scene.kinds == [EventKind.GROUP_RETRIED]
    assert [record.attempt for record in scene.records] == [0, 1]
    # The second is stored until the draw is dropped, and dropped with it.
    assert (scene.audit.attempts_pending, scene.audit.attempts_dropped_by_reason) == (1, {"too_few_scored": 1})


def test_a_retry_that_scores_enough_is_taken(play):
    outcome, scene = play((5, POOR), (5, GOOD))

    assert outcome.attempt == 1
    assert scene.audit.attempts_dropped_by_reason == {"too_few_scored": 1}


def test_a_refused_task_is_dropped_at_once_with_its_reason(play):
    outcome, scene = play((5, "does_not_fit"))

    assert outcome == Dropped("does_not_fit")
    fields = {"group": "e0000-i000000", "task": "task-0", "reason": "refused: does_not_fit"}
    assert scene.events == [(EventKind.TASK_REFUSED, fields)]


def test_a_result_that_the_ledger_does_not_await_trains_nothing_and_is_counted(play, monkeypatch):
    answer = Script._answer

    def stray(self, assignment, outcome):
        record = answer(self, assignment, outcome)
        return msgspec.structs.replace(record, incarnation=-1) if assignment.attempt == 0 else record

    monkeypatch.setattr(Script, "_answer", stray)
    outcome, scene = play((5, GOOD), (5, GOOD))

    assert (outcome.incarnation, outcome.attempt) == (0, 1)
    assert scene.records == [outcome]
    assert (scene.audit.late, scene.audit.balanced) == (1, True)
    assert scene.events == [(EventKind.RESULT_LATE, {"group": "e0000-i000000", "attempt": 0})]


def test_an_error_that_trying_again_does_not_mend_is_raised(play):
    with pytest.raises(DataError, match="asks for a second turn"):
        play((5, DataError("asks for a second turn")))


def test_a_caller_that_is_cancelled_takes_its_attempts_along(tmp_path):
    async def main():
        with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
            scene = Scene(ledger, Script(draw_0=[(3600, GOOD)] * 3))
            rolling = asyncio.create_task(scene.roller.roll(scene.admitted[0]))
            await asyncio.sleep(15)
            rolling.cancel()
            await asyncio.gather(rolling, return_exceptions=True)
            return scene.script.num_cancelled, ledger.audit().attempts_dropped_by_reason

    assert run_virtual(main()) == (2, {"overtaken": 2})


# --- together -------------------------------------------------------------------------------------------------------


def _together(tmp_path, **attempts):
    async def main():
        with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
            scene = Scene(ledger, Script(**attempts))
            outcomes = await scene.roller.roll_together(scene.admitted)
            scene.audit = ledger.audit()
            return outcomes, scene

    return run_virtual(main())


def test_groups_together_are_one_batch_and_what_must_be_rolled_again_is_another(tmp_path):
    outcomes, scene = _together(tmp_path, draw_0=[(5, GOOD)], draw_1=[(5, POOR), (5, GOOD)])

    assert scene.script.asked == [
        ["e0000-i000000, attempt 0", "e0000-i000001, attempt 0"],
        ["e0000-i000001, attempt 1"],
    ]
    assert [outcomes[f"e0000-i00000{index}"].attempt for index in range(2)] == [0, 1]


@pytest.mark.parametrize(("seconds", "outcome"), [(5, EngineDiedError("gone")), (3600, GOOD)])
def test_a_batch_that_is_lost_or_late_is_rolled_again_whole(tmp_path, seconds, outcome):
    outcomes, scene = _together(tmp_path, draw_0=[(seconds, outcome), (5, GOOD)], draw_1=[(5, GOOD), (5, GOOD)])

    assert [len(batch) for batch in scene.script.asked] == [2, 2]
    assert {record.attempt for record in outcomes.values()} == {1}
    assert scene.audit.attempts_dropped_by_reason == {"lost": 2}


def test_a_batch_that_is_lost_over_and_over_is_dropped(tmp_path):
    outcomes, _ = _together(tmp_path, **{f"draw_{index}": [(5, EngineDiedError("gone"))] * 3 for index in range(2)})

    assert set(outcomes.values()) == {Dropped("lost")}
