"""The order of draws: seeded, epoch after epoch, every task once in each."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from fourstroke.orchestration.draws import draw_order
from fourstroke.types import Task


def _tasks(count):
    return [Task(id=f"t{index}", prompt=(), answer="") for index in range(count)]


@given(st.integers(1, 20), st.integers(0, 2**31 - 1))
def test_each_epoch_draws_every_task_once(num_tasks, seed):
    drawn = list(islice(draw_order(_tasks(num_tasks), seed=seed), 3 * num_tasks))

    for epoch in range(3):
        part = drawn[epoch * num_tasks : (epoch + 1) * num_tasks]
        assert sorted(task.id for _, task in part) == sorted(task.id for task in _tasks(num_tasks))
        assert [draw.epoch for draw, _ in part] == [epoch] * num_tasks
        assert [draw.index for draw, _ in part] == list(range(num_tasks))
        assert all(draw.task_id == task.id for draw, task in part)


def test_the_order_repeats_with_its_seed_and_changes_with_another():
    def order(seed):
        return [(draw.key, draw.task_id, draw.seed) for draw, _ in islice(draw_order(_tasks(50), seed=seed), 100)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    ids = [task_id for _, task_id, _ in order(1)]
    assert ids[:50] != ids[50:]


def test_seeds_of_draws_are_distinct_and_leave_room_for_the_members():
    seeds = [draw.seed for draw, _ in islice(draw_order(_tasks(500), seed=0), 2000)]

    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    assert max(seeds) < 2**30


@given(st.integers(1, 12), st.integers(0, 2**31 - 1), st.integers(1, 40))
def test_the_order_goes_on_from_any_draw_an_epochs_last_one_too(num_tasks, seed, num_drawn):
    whole = list(islice(draw_order(_tasks(num_tasks), seed=seed), num_drawn + 2 * num_tasks))
    last, _ = whole[num_drawn - 1]

    resumed = draw_order(_tasks(num_tasks), seed=seed, after=(last.epoch, last.index))

    assert list(islice(resumed, 2 * num_tasks)) == whole[num_drawn:]
