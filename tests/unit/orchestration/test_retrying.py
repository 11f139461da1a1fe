"""Rollouts outside the ledger: what a dead part lost is rolled again, with the same seeds."""

import asyncio

import pytest

from fourstroke.errors import ActorDiedError, DataError, EngineDiedError
from fourstroke.orchestration.retrying import RetryingRollouts
from fourstroke.types import Assignment, Draw, RefusedGroup, Task

TASK = Task(id="t", prompt=(), answer="")
ASSIGNMENT = Assignment(
    draw=Draw(epoch=-1, index=0, task_id="t", seed=7),
    task=TASK,
    num_samples=2,
    admitted_version=0,
    incarnation=0,
    attempt=0,
)
ANSWER = (RefusedGroup(key="e-001-i000000", reason="", detail=""),)


class ScriptedPool:
    """Raises what the script says, then answers."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.asked = []

    async def run(self, assignments, *, is_together):
        self.asked.append((*assignments, is_together))
        if self.errors:
            raise self.errors.pop(0)
        return ANSWER


def _run(pool, *, max_attempts=3, is_together=False):
    return asyncio.run(RetryingRollouts(pool, max_attempts=max_attempts).run([ASSIGNMENT], is_together=is_together))


@pytest.mark.parametrize("is_together", [False, True])
def test_what_was_lost_is_rolled_again_under_another_name(is_together):
    pool = ScriptedPool(EngineDiedError("vllm-0 is gone"), ActorDiedError("worker-0 is gone"))

    assert _run(pool, is_together=is_together) == ANSWER

    assert [assignment.attempt for assignment, _ in pool.asked] == [0, 1, 2]
    assert {(assignment.draw, together) for assignment, together in pool.asked} == {(ASSIGNMENT.draw, is_together)}


def test_the_last_loss_is_raised():
    pool = ScriptedPool(*(EngineDiedError(f"vllm-{number} is gone") for number in range(3)))

    with pytest.raises(EngineDiedError, match="vllm-2 is gone"):
        _run(pool)
    assert len(pool.asked) == 3


def test_what_trying_again_does_not_mend_is_raised_at_once():
    pool = ScriptedPool(DataError("not finite"))

    with pytest.raises(DataError):
        _run(pool)
    assert len(pool.asked) == 1
