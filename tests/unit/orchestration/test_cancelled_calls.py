"""What becomes of an actor's call whose caller is cancelled. Ray itself is not started."""

import asyncio
from pathlib import Path

import pytest

from fourstroke.errors import ActorDiedError
from fourstroke.orchestration import placement


class Verb:
    """Of an actor that never answers."""

    def remote(self, *arguments):
        return arguments


class Actor:
    prepare = Verb()


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_call_in_order_is_never_taken_back(monkeypatch, is_ordered):
    """A hole in the order makes Ray give the actor up after 30 s: seen when a run ended while its trainer was asked
    whether it lives, on a machine too busy to have sent the question."""
    cancelled = []

    async def never(_reference):
        await asyncio.Event().wait()

    monkeypatch.setattr(placement, "_answer", never)
    monkeypatch.setattr(placement.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(placement.ray, "cancel", lambda reference, *, force: cancelled.append((reference, force)))
    handle = placement._Handle(
        "part", Actor(), log_path=Path("log"), died=ActorDiedError, cluster=None, is_ordered=is_ordered
    )

    async def scenario():
        calling = asyncio.create_task(handle.call("prepare", 7))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        return calling.cancelled()

    assert asyncio.run(scenario())
    assert cancelled == ([] if is_ordered else [((7,), False)])


def test_the_trainers_calls_are_in_order(monkeypatch, tmp_path):
    """Its actor takes one call at a time, while those of engines and workers are asynchronous."""
    made = {}

    class Handle:
        def __init__(self, name, actor, **options):
            made[name] = options.get("is_ordered", False)

    class Remote:
        def __call__(self, *_, **__):
            return self

        def __getattr__(self, name):
            return self

    monkeypatch.setattr(placement, "_Handle", Handle)
    monkeypatch.setattr(placement.ray, "remote", Remote())
    monkeypatch.setattr(placement.ray, "method", lambda **_: lambda method: method)
    config = placement.RunConfig.model_validate({})
    placement.RayTrainer(
        config, cluster=None, model_path=tmp_path, payload_dir=tmp_path, publication_path=tmp_path, log_path=tmp_path
    )

    assert made == {"trainer": True}
