"""The order in which tasks are drawn: a pure function of the run's seed, so that it can be replayed from any point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fourstroke.types import Draw, Task


def draw_order(
    tasks: Sequence[Task], *, seed: int, after: tuple[int, int] | None = None
) -> Iterator[tuple[Draw, Task]]:
    """Draws without end: each epoch is a fresh seeded permutation of all tasks.

    Args:
        tasks: The training split; at least one task.
        seed: The run's seed.
        after: Epoch and index of the last draw that was made, or None to begin; an epoch's end is no special case.

    Example:
        >>> tasks = [Task(id=name, prompt=(), answer="") for name in "abc"]
        >>> first_epoch = [draw.task_id for (draw, _), _ in zip(draw_order(tasks, seed=0), range(3))]
        >>> sorted(first_epoch)
        ['a', 'b', 'c']
        >>> next(draw_order(tasks, seed=0, after=(0, 2)))[0].key
        'e0001-i000000'
    """
    assert tasks, "no training task"
    epoch, next_index = (after[0], after[1] + 1) if after else (0, 0)
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(len(tasks))
        for index in range(next_index, len(tasks)):
            task = tasks[int(order[index])]
            yield Draw(epoch=epoch, index=index, task_id=task.id, seed=_draw_seed(seed, epoch, index)), task
        epoch, next_index = epoch + 1, 0


def _draw_seed(seed: int, epoch: int, index: int) -> int:
    """A seed for one draw, in [0, 2**30): room is left for the members to count up from it."""
    return int(np.random.SeedSequence([seed, epoch, index]).generate_state(1)[0]) >> 2
