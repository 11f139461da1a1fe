"""Planted faults of the control plane, each of which the simulation must find within so many seeds."""

import asyncio
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fourstroke.engines.fleet import Fleet
from fourstroke.orchestration import incarnations, restore
from fourstroke.orchestration.buffer import GroupBuffer
from fourstroke.orchestration.controller import Controller
from fourstroke.orchestration.rolling import Roller
from fourstroke.orchestration.slots import Slots
from fourstroke.store import Ledger
from fourstroke.testing.simulation import simulate


def one_slot_more(monkeypatch):
    plain = Slots.__init__

    def init(self, **sizes):
        plain(self, **sizes)
        self._capacity += 1

    monkeypatch.setattr(Slots, "__init__", init)


def slots_back_before_landing(monkeypatch):
    publish, give_back = Controller._publish, Controller._give_back

    async def publish_later(self, step):
        await give_back(self, self._config.rollout.groups_per_step)
        await publish(self, step)

    async def give_back_once(self, num_groups):
        if asyncio.current_task().get_name() != "train":
            await give_back(self, num_groups)

    monkeypatch.setattr(Controller, "_publish", publish_later)
    monkeypatch.setattr(Controller, "_give_back", give_back_once)


def a_window_too_wide(monkeypatch):
    plain = GroupBuffer.__init__

    def init(self, *, window):
        plain(self, window=window + 1)

    monkeypatch.setattr(GroupBuffer, "__init__", init)


def duplicates_are_received(monkeypatch):
    plain = Ledger.receive

    def receive(self, record):
        return plain(self, record) or bool(
            self._file.connection.execute(
                "UPDATE attempts SET state = 'stored', reason = NULL WHERE key = ? AND incarnation = ? AND attempt = ?",
                (record.id, record.incarnation, record.attempt),
            ).rowcount
        )

    monkeypatch.setattr(Ledger, "receive", receive)


def late_results_are_trained(monkeypatch):
    plain = Roller._on_result

    def on_result(self, admitted, result):
        outcome = plain(self, admitted, result)
        return result if outcome is None and hasattr(result, "scored") and len(result.scored) >= 2 else outcome

    monkeypatch.setattr(Roller, "_on_result", on_result)


def a_replacement_serves_before_it_caught_up(monkeypatch):
    plain = Fleet._land

    async def land(self, engine, publication):
        self._routable.add(engine.name)
        await self._tell()
        return await plain(self, engine, publication)

    monkeypatch.setattr(Fleet, "_land", land)


def a_dead_engine_counts_as_landed(monkeypatch):
    plain = Fleet._land

    async def land(self, engine, publication):
        await plain(self, engine, publication)
        return True

    monkeypatch.setattr(Fleet, "_land", land)


def a_resume_forgets_pending_draws(monkeypatch):
    plain = restore.restore

    def forgetful(ledger, config, *, step, reason):
        return replace(plain(ledger, config, step=step, reason=reason), past_draws=())

    monkeypatch.setattr(incarnations, "restore", forgetful)


def a_resume_draws_from_the_start_again(monkeypatch):
    plain = restore.restore

    def forgetful(ledger, config, *, step, reason):
        return replace(plain(ledger, config, step=step, reason=reason), cursor=None)

    monkeypatch.setattr(incarnations, "restore", forgetful)


def superseded_groups_are_used_again(monkeypatch):
    monkeypatch.setattr(restore, "why_not", lambda *_args, **_kwargs: "")


def a_resume_ignores_the_newest_checkpoint(monkeypatch):
    monkeypatch.setattr(incarnations, "newest_checkpoint", lambda _folder: 0)


def trained_before_it_is_published_and_saved_first(monkeypatch):
    plain = Controller._train

    async def train(self, step, groups):
        await plain(self, step, groups)
        await self._checkpoint(step)
        await self._checkpoint_is_whole()

    monkeypatch.setattr(Controller, "_train", train)


def attempts_are_left_pending(monkeypatch):
    async def give_up(self, admitted, running):
        for task in running:
            task.cancel()

    monkeypatch.setattr(Roller, "_give_up", give_up)


MUTANTS = {
    one_slot_more: 300,
    slots_back_before_landing: 300,
    a_window_too_wide: 300,
    duplicates_are_received: 300,
    late_results_are_trained: 300,
    a_replacement_serves_before_it_caught_up: 300,
    a_dead_engine_counts_as_landed: 300,
    a_resume_forgets_pending_draws: 300,
    a_resume_draws_from_the_start_again: 300,
    superseded_groups_are_used_again: 300,
    a_resume_ignores_the_newest_checkpoint: 300,
    trained_before_it_is_published_and_saved_first: 300,
    attempts_are_left_pending: 300,
}


@pytest.mark.parametrize(("plant", "num_seeds"), MUTANTS.items(), ids=[plant.__name__ for plant in MUTANTS])
def test_the_simulation_finds(plant, num_seeds, monkeypatch):
    plant(monkeypatch)

    for seed in range(num_seeds):
        with TemporaryDirectory() as folder:
            if failures := simulate(seed, Path(folder)).failures:
                print(f"seed {seed}: {failures}")
                return
    pytest.fail(f"not found by {num_seeds} seeds")
