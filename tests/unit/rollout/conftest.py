"""What the tests of rollout share: a configuration, an assignment, and parts for it."""

import pytest

from fourstroke.config import load_config
from fourstroke.testing.environment import FakeTaskset
from fourstroke.types import Assignment, Draw


@pytest.fixture
def config():
    return load_config({"rollout": {"max_tokens": 6}, "engine": {"max_model_len": 64}})


@pytest.fixture
def taskset():
    return FakeTaskset()


@pytest.fixture
def assign(taskset):
    """Makes assignments of the taskset's first task."""

    def assignment(index=3, *, num_samples=4, attempt=0, incarnation=2, version=5):
        task = taskset.train[0]
        return Assignment(
            draw=Draw(epoch=0, index=index, task_id=task.id, seed=77 + index),
            task=task,
            num_samples=num_samples,
            admitted_version=version,
            incarnation=incarnation,
            attempt=attempt,
        )

    return assignment
