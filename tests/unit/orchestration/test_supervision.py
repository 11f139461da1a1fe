"""The supervision policy as a table: a fault and what came before it, and what is done."""

import pytest

from fourstroke.config import SupervisionConfig
from fourstroke.orchestration.supervision import Action, Fault, FaultKind, Supervisor, decide

LIMITS = SupervisionConfig(max_replacements=2, max_attempts=3)
ENGINE, WORKER, TRAINER = FaultKind.ENGINE_DIED, FaultKind.WORKER_DIED, FaultKind.TRAINER_DIED
LOST, LATE = FaultKind.GROUP_LOST, FaultKind.GROUP_LATE


def _fault(kind, *, subject="", step=20, num_others=0):
    return Fault(kind=kind, subject=subject or kind.value, step=step, num_others=num_others, reason="seen")


@pytest.mark.parametrize(
    ("kind", "before", "action"),
    [
        (LOST, [], Action.RETRY),
        (LATE, [], Action.RETRY),
        (LOST, [_fault(LOST)], Action.RETRY),
        (LOST, [_fault(LOST)] * 2, Action.SHRINK),
        # A try is a try, however it ended.
        (LOST, [_fault(LOST), _fault(LATE, subject=LOST.value)], Action.SHRINK),
        # Other groups' tries, and the deaths of parts, are not this group's.
        (LOST, [_fault(LOST, subject="another")] * 5, Action.RETRY),
        (LOST, [_fault(ENGINE)] * 5, Action.RETRY),
    ],
)
def test_a_group_is_tried_so_often_and_then_replaced(kind, before, action):
    assert decide(_fault(kind), before, limits=LIMITS) is action


@pytest.mark.parametrize("kind", [ENGINE, WORKER, TRAINER])
@pytest.mark.parametrize(
    ("steps_before", "num_others", "action"),
    [
        ([], 0, Action.REPLACE),
        ([20], 0, Action.REPLACE),
        ([20, 20], 0, Action.STOP),
        ([20, 20], 1, Action.SHRINK),
        # Ten steps are remembered: 11 to 20.
        ([11, 11], 0, Action.STOP),
        ([10, 11], 0, Action.REPLACE),
        ([1, 2, 3, 4, 10, 10], 0, Action.REPLACE),
    ],
)
def test_a_dead_part_is_replaced_so_often(kind, steps_before, num_others, action):
    before = [_fault(kind, step=step) for step in steps_before]

    assert decide(_fault(kind, num_others=num_others), before, limits=LIMITS) is action


def test_deaths_of_all_parts_count_together_and_groups_do_not():
    before = [_fault(TRAINER), _fault(WORKER), *[_fault(LOST)] * 9]

    assert decide(_fault(ENGINE), before, limits=LIMITS) is Action.STOP
    assert decide(_fault(ENGINE), before[1:], limits=LIMITS) is Action.REPLACE


def test_nothing_is_replaced_where_the_limit_is_zero():
    limits = SupervisionConfig(max_replacements=0, max_attempts=1)

    assert decide(_fault(TRAINER), [], limits=limits) is Action.STOP
    assert decide(_fault(LOST), [], limits=limits) is Action.SHRINK


def test_the_supervisor_remembers():
    supervisor = Supervisor(LIMITS)

    actions = [supervisor.decide(_fault(TRAINER, step=step)).value for step in (1, 2, 3, 12, 13, 14)]

    # At step 12 the deaths of steps 3 and later count: one; at 13 two, and those of 13 and 12 at 14.
    assert actions == ["replace", "replace", "stop", "replace", "replace", "stop"]
