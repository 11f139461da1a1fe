"""S33: tasks are told apart by their id, never by their text (verl-project/verl#3238).

Three of four tasks ask the same about other pictures. The buggy system took them for one task with six samples: a mean
over two tasks of 2/3, and a best of 6 of 1.
"""

import asyncio

import msgspec

from fourstroke.config import AlgorithmConfig, load_config
from fourstroke.evaluation import evaluate
from fourstroke.orchestration.batching import build_batches
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.types import Message, Task

TEXTS = ("Find x.", "Find x.", "Find x.", "Find y.")
REWARDS = ([1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0])
TASKS = tuple(
    Task(id=f"problem-{number}", prompt=(Message(role="user", content=text),), answer="")
    for number, text in enumerate(TEXTS)
)


class Rollouts:
    """The rewards of the case."""

    async def run(self, assignments, *, is_together):
        del is_together
        return tuple(
            msgspec.structs.replace(make_record(make_group(REWARDS[a.draw.index], index=a.draw.index)), draw=a.draw)
            for a in assignments
        )


def test_means_are_over_problems_by_id():
    config = load_config({"evaluation": {"samples_per_task": 2, "pass_at": [1, 2]}})

    report = asyncio.run(evaluate(TASKS, name="before", rollouts=Rollouts(), config=config, version=0))

    assert (report.estimate.mean, report.estimate.num_tasks, report.estimate.num_samples) == (0.5, 4, 8)
    assert report.pass_at == {1: 0.5, 2: 0.5}  # no 6
    assert report.scores == {f"problem-{number}": rewards for number, rewards in enumerate(REWARDS)}


def test_advantages_are_within_one_draw_of_one_problem():
    groups = [make_record(make_group(scores, index=index)) for index, scores in enumerate(([1.0, 0.0], [1.0, 1.0]))]
    algorithm = AlgorithmConfig.model_validate({"name": "grpo", "advantage": "group_centred"})

    (batch,) = build_batches(groups, step=1, algorithm=algorithm, max_tokens=8)

    # Taken together, the four would have the mean 0.75.
    assert [row.advantage for row in batch.rows] == [0.5, -0.5, 0.0, 0.0]
