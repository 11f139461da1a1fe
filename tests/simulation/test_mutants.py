"""Planted faults of the control plane, each of which the simulation must find within so many seeds."""

import asyncio
from dataclasses import replace

import pytest

from fourstroke.engines.fleet import Fleet
from fourstroke.orchestration import incarnations, restore
from fourstroke.orchestration.buffer import GroupBuffer
from fourstroke.orchestration.controller import Controller
from fourstroke.orchestration.rolling import Roller
from fourstroke.orchestration.slots import Slots
from fourstroke.store import Ledger


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


def a_replacement_serves_before_it_caught_up(monkeypatch):
    plain = Fleet._land

    async def land(self, engine, publication):
        self._routable.add(engine.name)
        await self._tell()
        return await plain(self, engine, publication)

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


def a_checkpoint_is_written_before_the_ledger_knows(monkeypatch):
    plain = Controller._train

    async def train(self, step, groups):
        await plain(self, step, groups)
        await self._checkpoint(step)
        await self._checkpoint_is_whole()

    monkeypatch.setattr(Controller, "_train", train)


def position_does_not_count(monkeypatch):
    plain = restore.why_not

    def at_the_front(group, *, position, version, config):
        return plain(group, position=0, version=version, config=config)

    monkeypatch.setattr(restore, "why_not", at_the_front)


def attempts_of_the_past_stay_pending(monkeypatch):
    plain = Ledger.open_incarnation

    def open_incarnation(self, *, from_step, reason):
        rows = self._file.connection.execute("SELECT key, incarnation, attempt FROM attempts WHERE state = 'pending'")
        before = rows.fetchall()
        number = plain(self, from_step=from_step, reason=reason)
        for row in before:
            self._file.connection.execute(
                "UPDATE attempts SET state = 'pending', reason = NULL "
                "WHERE key = ? AND incarnation = ? AND attempt = ?",
                row,
            )
        return number

    monkeypatch.setattr(Ledger, "open_incarnation", open_incarnation)


def attempts_are_left_pending(monkeypatch):
    async def give_up(self, admitted, running):
        for task in running:
            task.cancel()

    monkeypatch.setattr(Roller, "_give_up", give_up)


MUTANTS = {
    one_slot_more: 30,
    slots_back_before_landing: 30,
    a_window_too_wide: 30,
    duplicates_are_received: 30,
    a_replacement_serves_before_it_caught_up: 300,
    a_resume_forgets_pending_draws: 30,
    a_resume_draws_from_the_start_again: 30,
    superseded_groups_are_used_again: 100,
    a_resume_ignores_the_newest_checkpoint: 300,
    a_checkpoint_is_written_before_the_ledger_knows: 100,
    attempts_are_left_pending: 300,
    attempts_of_the_past_stay_pending: 50,
    position_does_not_count: 300,
}


@pytest.mark.parametrize(("plant", "num_seeds"), MUTANTS.items(), ids=[plant.__name__ for plant in MUTANTS])
def test_the_simulation_finds(plant, num_seeds, simulated, monkeypatch):
    plant(monkeypatch)

    assert any(simulated(seed).failures for seed in range(num_seeds))
