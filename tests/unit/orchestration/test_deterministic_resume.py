"""A deterministic run that loses its trainer at any step goes on so that its records are those of one that did not."""

import asyncio

import pytest

from fourstroke.config import load_config
from fourstroke.errors import ActorDiedError
from fourstroke.observability import METRICS
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.environment import FakeTaskset, ParityGrader
from fourstroke.testing.run import FakeParts, FakeRun
from fourstroke.testing.trainer import FakeTrainer

CONFIG = {
    "num_steps": 6,
    "deterministic": True,
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_tokens": 8},
    "engine": {"max_model_len": 64},
    "trainer": {"microbatch_tokens": 64},
    "checkpoint": {"every_steps": 2},
}


def _records(folder, *, deaths):
    """Records by step without what is timing; the trainer dies at each of these steps, once."""
    folder.mkdir()
    records = {}

    async def main():
        for death in (*deaths, None):
            tasks = FakeTaskset(num_train=6)
            trainer = FakeTrainer(dies_at_step=death)
            parts = FakeParts(taskset=tasks, grader=ParityGrader(), trainers=[trainer])
            run = FakeRun(load_config(CONFIG), folder, parts=parts, on_step=records.__setitem__)
            async with run.started():
                if death is None:
                    await run.train(tasks.train)
                else:
                    with pytest.raises(ActorDiedError):
                        await run.train(tasks.train)
            await asyncio.sleep(0)

    run_virtual(main())
    return [
        {name: value for name, value in records[step].items() if name == "step" or not METRICS[name].is_timing}
        for step in sorted(records)
    ]


@pytest.mark.parametrize("deaths", [(1,), (4,), (2, 4, 4, 6)])
def test_the_records_of_a_resumed_run_are_those_of_one_without_a_death(tmp_path, deaths):
    uninterrupted = _records(tmp_path / "a", deaths=())

    assert _records(tmp_path / "b", deaths=deaths) == uninterrupted
    assert [record["ledger/draws/drawn"] for record in uninterrupted] == [4, 8, 12, 16, 20, 24]
