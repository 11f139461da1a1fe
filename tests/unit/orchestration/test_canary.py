"""The proof that engines compute with the trainer's weights: floor, limit, what stops, what is told."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fourstroke.config import load_config
from fourstroke.errors import EngineDiedError, MismatchError
from fourstroke.orchestration.canary import CanaryWatch
from fourstroke.testing.trainer import EMPTY_CANARY, FakeTrainer
from fourstroke.types import Canary, WeightVersion

IDS = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)


def says(values: float | list[list[float]]) -> Canary:
    return Canary(ids_BT=IDS, logprobs_BT=np.broadcast_to(np.array(values, np.float32), (2, 2)).copy())


class Engine:
    """Says what it is told to."""

    def __init__(self, *values: float | list[list[float]] | Exception, name: str = "vllm-0") -> None:
        self.name, self.version = name, WeightVersion(incarnation=0, number=1, digest="ab")
        self._values = list(values)

    async def score(self, ids_BT: np.ndarray) -> Canary:
        np.testing.assert_array_equal(ids_BT, IDS)
        value = self._values.pop(0)
        if isinstance(value, Exception):
            raise value
        return says(value)


def watch_of(dtype: str, **trainer: object) -> CanaryWatch:
    return CanaryWatch(load_config({"engine": {"dtype": dtype}, "trainer": {"compute_dtype": dtype, **trainer}}))


def trainer_saying(value: float) -> FakeTrainer:
    return FakeTrainer(verb_s=0.0, canary=lambda _version: says(value))


async def publications(watch: CanaryWatch, engine: Engine, *, floor_engines: list[Engine], number: int) -> None:
    trainer = trainer_saying(-2.0)
    await watch.measure_floor(trainer, floor_engines)
    for _ in range(number):
        await watch.expect(trainer)
        await watch.prove(engine)


def test_the_reading_is_the_mean_absolute_difference() -> None:
    watch = watch_of("bfloat16")
    engine = Engine([[-2.1, -1.9], [-2.0, -2.4]])
    asyncio.run(publications(watch, engine, floor_engines=[Engine(-2.1)], number=1))
    assert watch.reading == pytest.approx((0.1 + 0.1 + 0 + 0.4) / 4, abs=1e-6)
    assert watch.floor == pytest.approx(0.1, abs=1e-6)
    assert watch.limit == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "floor", "reading", "is_refused"),
    [
        ("bfloat16", 0.05, 0.14, False),
        ("bfloat16", 0.05, 0.16, True),
        ("float32", 1e-5, 0.9e-4, False),  # three times the floor is less than what fp32 may differ by anyway
        ("float32", 1e-5, 1.2e-4, True),
        ("float32", 1e-4, 2.8e-4, False),
        ("float32", 1e-4, 3.2e-4, True),
        ("bfloat16", 0.0, float("nan"), True),
    ],
)
def test_a_reading_over_three_floors_stops_the_run(dtype: str, floor: float, reading: float, is_refused: bool) -> None:
    watch = watch_of(dtype)
    trial = publications(watch, Engine(-2.0 + reading), floor_engines=[Engine(-2.0 + floor)], number=1)
    if not is_refused:
        asyncio.run(trial)
        return
    with pytest.raises(
        MismatchError, match=r"^vllm-0 took weights 0\.1-ab whole and computes with others: .* at the c"
    ):
        asyncio.run(trial)


@pytest.mark.parametrize(("dtype", "reading"), [("bfloat16", 0.3), ("float32", 2e-3), ("float32", float("nan"))])
def test_a_checkpoint_that_they_disagree_on_stops_the_run_at_its_start(dtype: str, reading: float) -> None:
    watch = watch_of(dtype)
    with pytest.raises(MismatchError, match=r"vllm-1 and the trainer differ by .* on the checkpoint"):
        asyncio.run(watch.measure_floor(trainer_saying(-2.0), [Engine(-2.0), Engine(-2.0 + reading, name="vllm-1")]))


def test_the_users_own_limit_holds_at_the_start() -> None:
    asyncio.run(watch_of("float32", max_mismatch=0.1).measure_floor(trainer_saying(-2.0), [Engine(-2.05)]))


def test_the_floor_is_that_of_the_engine_which_differs_most_and_a_dead_one_has_none() -> None:
    watch = watch_of("bfloat16")
    engines = [Engine(-2.01), Engine(EngineDiedError("gone")), Engine(-2.04), Engine(-2.02)]
    asyncio.run(watch.measure_floor(trainer_saying(-2.0), engines))
    assert watch.floor == pytest.approx(0.04, abs=1e-6)


def test_without_a_floor_the_limit_is_that_of_the_dtype() -> None:
    watch = watch_of("bfloat16")
    dead = Engine(EngineDiedError("gone"))
    asyncio.run(publications(watch, Engine(-2.2), floor_engines=[dead], number=1))
    assert watch.floor is None
    with pytest.raises(MismatchError, match="no floor was taken"):
        asyncio.run(watch.prove(Engine(-2.3)))


def test_an_engine_that_dies_is_not_a_mismatch() -> None:
    with pytest.raises(EngineDiedError):
        asyncio.run(
            publications(watch_of("float32"), Engine(EngineDiedError("gone")), floor_engines=[Engine(-2.0)], number=1)
        )


def test_the_reading_of_several_engines_is_the_largest() -> None:
    async def scenario() -> float | None:
        watch, trainer = watch_of("bfloat16"), trainer_saying(-2.0)
        await watch.measure_floor(trainer, [Engine(-2.05)])
        await watch.expect(trainer)
        for value in (-2.01, -2.09, -2.03):
            await watch.prove(Engine(value))
        return watch.reading

    assert asyncio.run(scenario()) == pytest.approx(0.09, abs=1e-6)


@pytest.mark.parametrize(("values", "is_rising"), [([0.05] * 6, False), ([0.05, 0.05] + [0.12] * 6, True)])
def test_readings_that_stay_well_above_the_floor_are_a_rise(values: list[float], is_rising: bool) -> None:
    watch = watch_of("bfloat16")
    engine = Engine(*(-2.0 - value for value in values))
    asyncio.run(publications(watch, engine, floor_engines=[Engine(-2.05)], number=len(values)))
    assert watch.is_rising is is_rising


def test_one_high_reading_is_no_rise() -> None:
    watch = watch_of("bfloat16")
    values = [0.05, 0.05, 0.14, 0.05, 0.05, 0.05]
    asyncio.run(
        publications(watch, Engine(*(-2.0 - value for value in values)), floor_engines=[Engine(-2.05)], number=6)
    )
    assert not watch.is_rising


def test_a_canary_without_rows_asks_nothing() -> None:
    async def scenario() -> float | None:
        watch, trainer = watch_of("float32"), FakeTrainer(verb_s=0.0, canary=lambda _version: EMPTY_CANARY)
        await watch.measure_floor(trainer, [Engine()])
        await watch.expect(trainer)
        await watch.prove(Engine())
        return watch.reading

    assert asyncio.run(scenario()) is None


def test_an_engine_that_cannot_tell_turns_it_off() -> None:
    class Mute(Engine):
        async def score(self, ids_BT: np.ndarray) -> Canary:
            return EMPTY_CANARY

    async def scenario() -> tuple[bool, float | None]:
        watch, trainer = watch_of("float32"), trainer_saying(-2.0)
        await watch.measure_floor(trainer, [Mute()])
        await watch.expect(trainer)
        await watch.prove(Mute())
        return watch.is_off, watch.reading

    assert asyncio.run(scenario()) == (True, None)
