"""S19: a resume exactly at an epoch's end goes on with the next epoch (verl-project/verl#7401).

12 samples, 4 a step, 2 epochs: six steps. The buggy system replayed the exhausted loader: no update, and status 0.
"""

import itertools

import pytest

from fourstroke.errors import ActorDiedError
from fourstroke.orchestration import controller
from fourstroke.orchestration.controller import LoopEndedError
from fourstroke.testing.trainer import FakeTrainer


@pytest.fixture
def config(configure):
    return lambda every_steps: configure("num_steps=6", f"checkpoint.every_steps={every_steps}", groups_per_step=4)


def _draws_by_step(trainer):
    """Which draws each update trained: epoch and index."""
    return [sorted({row.partition(".")[0] for row in update}) for update in trainer.trained if update]


@pytest.mark.parametrize("step", [3, 2])
@pytest.mark.parametrize("dies_at_step", ["next", "last"])
def test_order_and_weights_are_those_of_the_run_that_was_not_stopped(tmp_path, config, live, step, dies_at_step):
    whole = live(tmp_path / "whole", config(step))
    # The checkpoint of a step is whole before the next update begins to die; later ones may not be.
    dying = FakeTrainer(dies_at_step=step + 1 if dies_at_step == "next" else 2 * step)

    first = live(tmp_path / "stopped", config(step), trainers=[dying])
    second = live(tmp_path / "stopped", config(step))

    assert isinstance(first.error, ActorDiedError)
    assert second.error is None
    assert second.steps == list(range(step + 1, 7))
    assert second.trainer.published[0] == (1, step)
    assert _draws_by_step(second.trainer) == _draws_by_step(whole.trainer)
    assert second.trainer.weight == whole.trainer.weight != 0.0
    assert (second.audit.drawn, second.audit.trained, second.audit.balanced) == (24, 24, True)


def test_each_epoch_trains_each_sample_once(tmp_path, config, live):
    life = live(tmp_path, config(3))

    assert life.steps == [1, 2, 3, 4, 5, 6]
    drawn = [f"e{epoch:04d}-i{index:06d}" for epoch in range(2) for index in range(12)]
    trained = {draw for step in _draws_by_step(life.trainer) for draw in step}
    assert trained <= set(drawn)
    assert life.audit.trained == len(drawn)


def test_a_source_of_draws_that_ends_is_an_error_and_no_end(tmp_path, config, live, monkeypatch):
    plain = controller.draw_order
    monkeypatch.setattr(controller, "draw_order", lambda *a, **named: itertools.islice(plain(*a, **named), 12))

    life = live(tmp_path, config(3))

    assert isinstance(life.error, LoopEndedError)
    assert "the feed loop ended before the last step" in str(life.error)
    assert len(life.steps) < 6
