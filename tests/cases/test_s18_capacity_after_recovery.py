"""S18: the capacity after a resume counts what was trained before it (areal-project/AReaL#1388).

capacity = (max staleness + version + 1) * B - (accepted + running), with B = 32, a staleness of 2, resumed at version
300: 96, for 9,600 groups were accepted. With the count at 0 it would be 9,696.
"""

import asyncio

from fourstroke.testing.environment import ParityGrader
from fourstroke.testing.episodes import make_group

NUM_TASKS = 1000


class PatientGrader(ParityGrader):
    """Grades nothing before it may."""

    def __init__(self):
        self.may_grade = asyncio.Event()

    async def grade(self, task, episode):
        await self.may_grade.wait()
        return await super().grade(task, episode)


def test_a_run_resumed_at_version_300_admits_96_groups_and_counts_on_from_300(configure, leave, live):
    # The 300th step's draws, numbers 9,568 to 9,599: of epoch 9, with a thousand tasks.
    last_step = [make_group([1.0, 0.0], epoch=9, index=568 + index, version=299) for index in range(32)]
    past = leave(step=300, trained=last_step)
    grader, seen = PatientGrader(), []
    overrides = ["num_steps=304", "deadlines.grade_s=100000", "deadlines.group_s=100000"]
    config = configure(*overrides, groups_per_step=32, staleness=2, group_size=2)

    async def look(run):
        await asyncio.sleep(3600)
        audit = run.ledger.audit()
        seen.append((audit.drawn - len(last_step), run.crew.fleet.version.number, run.ledger.cursor()))
        grader.may_grade.set()

    life = live(past, config, num_tasks=NUM_TASKS, grader=grader, meanwhile=look)

    assert seen == [(96, 300, (9, 695))]
    assert life.error is None
    assert life.trainer.published[:2] == [(1, 300), (1, 301)]
    assert life.audit.max_lag <= 2
