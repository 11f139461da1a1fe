"""Evaluation over fake rollouts: what is in a mean and what is only counted, seeds, batches, progress, failure."""

import asyncio

import pytest

from fourstroke.config import load_config
from fourstroke.errors import DataError, DoesNotFitError, EngineDiedError
from fourstroke.evaluation import evaluate
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.environment import FakeTaskset
from fourstroke.testing.episodes import NOWHERE
from fourstroke.types import EpisodeRecord, GroupRecord, RefusedGroup, Scored, StopReason, Tamper, Unscored

UNSCORED = Unscored(reason="error", detail="boom", grader="g@0", cost_s=0.0)
TAMPER = Tamper(reason="wrote", grader="g@0", cost_s=0.0)


def _scored(score):
    return Scored(score=score, components={}, reason="", grader="g@0", cost_s=0.0)


def _done(score, *, num_tokens=3):
    return _scored(score), StopReason.FINISHED, num_tokens


class FakeRollouts:
    """Gives each task the outcomes of a function of its index; later tasks may be done earlier."""

    def __init__(self, outcomes):
        self.outcomes = outcomes
        self.batches = []
        self.num_cancelled = 0

    @property
    def draws(self):
        return [assignment.draw for batch, _ in self.batches for assignment in batch]

    async def run(self, assignments, *, is_together):
        self.batches.append((assignments, is_together))
        try:
            await asyncio.sleep(5 - assignments[0].draw.index % 5)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return tuple(self._outcome(assignment) for assignment in assignments)

    def _outcome(self, assignment):
        outcomes = self.outcomes(assignment.draw.index)
        if isinstance(outcomes, RefusedGroup):
            return outcomes
        assert len(outcomes) == assignment.num_samples
        return GroupRecord(
            draw=assignment.draw,
            admitted_version=assignment.admitted_version,
            incarnation=assignment.incarnation,
            attempt=assignment.attempt,
            episodes=tuple(
                EpisodeRecord(
                    member=member,
                    stop=stop,
                    verdict=verdict,
                    num_sampled_tokens=num_tokens,
                    versions=(),
                    rows=(),
                    failure="",
                )
                for member, (verdict, stop, num_tokens) in enumerate(outcomes)
            ),
            reference=NOWHERE,
        )


def _config(*overrides, **values):
    return load_config({"evaluation": {"samples_per_task": 2, **values}}, overrides=overrides)


def _evaluate(rollouts, config, *, num_tasks=4, **named):
    tasks = FakeTaskset(num_held_out=num_tasks).held_out
    return run_virtual(evaluate(tasks, name="before", rollouts=rollouts, config=config, version=5, **named))


def test_means_leave_out_what_has_no_score_and_the_report_counts_it():
    table = [
        [_done(1.0), _done(1.0)],
        [_done(0.0), (UNSCORED, StopReason.FINISHED, 3)],
        [(_scored(1.0), StopReason.LENGTH, 11), (TAMPER, StopReason.FINISHED, 3)],
        [(UNSCORED, StopReason.FAILED, 0), (UNSCORED, StopReason.FAILED, 0)],
    ]

    report = _evaluate(FakeRollouts(lambda index: table[index]), _config(pass_at=[1, 2]))

    assert report.estimate.mean == pytest.approx(2 / 3)
    assert (report.estimate.num_tasks, report.estimate.num_samples) == (3, 4)
    assert report.pass_at == {1: pytest.approx(2 / 3), 2: 1.0}  # only the first task has two scored episodes
    assert report.pass_hat == {1: pytest.approx(2 / 3), 2: 1.0}
    assert report.num_tasks_without_score == 1
    assert (report.num_unscored, report.num_tampered, report.num_failed, report.num_truncated) == (3, 1, 2, 1)
    assert report.mean_tokens == pytest.approx((3 + 3 + 3 + 3 + 11 + 3) / 6)
    assert (report.name, report.version, report.seconds) == ("before", 5, 5.0)


def test_a_k_that_no_task_allows_is_absent():
    outcomes = [_done(1.0), (UNSCORED, StopReason.FINISHED, 3)]

    report = _evaluate(FakeRollouts(lambda _index: outcomes), _config(pass_at=[1, 2]))

    assert report.pass_at == {1: 1.0}


def test_draws_are_outside_the_ledger_and_their_seeds_belong_to_the_tasks():
    first, second, other = (FakeRollouts(lambda index: [_done(index % 2), _done(1.0)]) for _ in range(3))

    _evaluate(first, _config())
    _evaluate(second, _config())
    _evaluate(other, _config("seed=1"))

    assert {draw.epoch for draw in first.draws} == {-1}
    assert {assignment.admitted_version for batch, _ in first.batches for assignment in batch} == {5}
    assert first.draws == second.draws
    assert len({draw.seed for draw in first.draws + other.draws}) == 8
    assert all(0 <= draw.seed < 2**31 for draw in first.draws)


def test_tasks_go_side_by_side_and_are_counted_off():
    seen = []
    rollouts = FakeRollouts(lambda index: [_done(index % 2), _done(1.0)])

    report = _evaluate(rollouts, _config(num_tasks=3), num_tasks=9, on_task=lambda *counts: seen.append(counts))

    assert [draw.index for draw in rollouts.draws] == [0, 1, 2]
    assert [is_together for _, is_together in rollouts.batches] == [False] * 3
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert report.seconds == 5.0


def test_deterministic_tasks_go_in_batches_as_large_as_the_engines_one_after_the_other():
    seen = []
    rollouts = FakeRollouts(lambda index: [_done(index % 2), _done(1.0)])
    config = _config("deterministic=true", "engine.max_num_seqs=9")  # four tasks of two samples

    report = _evaluate(rollouts, config, num_tasks=6, on_task=lambda *counts: seen.append(counts))

    assert [[one.draw.index for one in batch] for batch, _ in rollouts.batches] == [[0, 1, 2, 3], [4, 5]]
    assert [is_together for _, is_together in rollouts.batches] == [True, True]
    assert seen == [(4, 6), (6, 6)]
    assert report.seconds == 5 + 1


def test_a_task_of_more_samples_than_the_engine_holds_is_a_batch_of_its_own():
    rollouts = FakeRollouts(lambda index: [_done(index % 2), _done(1.0)])

    _evaluate(rollouts, _config("deterministic=true", "engine.max_num_seqs=1"), num_tasks=2)

    assert [len(batch) for batch, _ in rollouts.batches] == [1, 1]


def test_no_score_at_all_is_an_error_with_the_first_cause():
    with pytest.raises(DataError, match="error: boom"):
        _evaluate(FakeRollouts(lambda _index: [(UNSCORED, StopReason.FINISHED, 3)] * 2), _config())


@pytest.mark.parametrize(("reason", "error"), [("does_not_fit", DoesNotFitError), ("not_finite", DataError)])
def test_a_refused_task_ends_the_evaluation_with_the_reason(reason, error):
    refusal = RefusedGroup(key="e-001-i000002", reason=reason, detail="task 9f2c has a prompt of 900 tokens")

    with pytest.raises(error, match="a prompt of 900 tokens") as caught:
        _evaluate(FakeRollouts(lambda index: refusal if index == 2 else [_done(1.0)] * 2), _config())
    assert type(caught.value) is error


def test_rollouts_that_fail_end_the_evaluation_and_cancel_the_rest():
    def outcomes(index):
        if index == 4:
            raise EngineDiedError("vllm-0 died")
        return [_done(1.0)] * 2

    rollouts = FakeRollouts(outcomes)
    with pytest.raises(EngineDiedError, match="vllm-0 died"):
        _evaluate(rollouts, _config(), num_tasks=5)
    assert rollouts.num_cancelled == 4
