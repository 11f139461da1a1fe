"""Proves that engines compute with the trainer's weights: both score the same fixed tokens, and must agree.

    checkpoint: trainer and engines score -> floor           (what two right implementations differ by)
    publication: trainer scores -> each engine loads, scores while it is paused -> reading -> resume, or stop

Digests prove that bytes arrived. This proves what was made of them, before a token is sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from fourstroke.config import RunConfig
from fourstroke.errors import EngineDiedError, MismatchError
from fourstroke.orchestration.measures import dtype_mismatch_limit
from fourstroke.types import Canary, Engine, Trainer

# A reading may be so many times the floor, and need not be under the least that two right fp32 implementations show.
_TIMES_FLOOR, _LEAST_LIMIT = 3.0, 1e-4
# Of so many readings the median, so many times the floor, is a rise.
_NUM_READINGS, _TIMES_FLOOR_RISEN = 5, 2.0


class CanaryWatch:
    """Compares trainer and engines on the trainer's canary; a canary without rows compares nothing.

    Readings are mean absolute differences of log-probability in nats a token.

    Example:
        >>> watch = CanaryWatch(config)  # doctest: +SKIP
        >>> await watch.measure_floor(trainer, engines)  # doctest: +SKIP
        >>> await watch.expect(trainer)  # doctest: +SKIP
        >>> await watch.prove(engine)  # doctest: +SKIP
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._floor: float | None = None
        self._expected: Canary | None = None
        self._is_off = False
        self._readings: deque[float] = deque(maxlen=_NUM_READINGS)
        self._latest = 0.0

    @property
    def floor(self) -> float | None:
        """The reading at the checkpoint; none where it was not taken."""
        return self._floor

    @property
    def is_off(self) -> bool:
        """Whether an engine cannot tell, so that nothing is compared."""
        return self._is_off

    @property
    def limit(self) -> float:
        """Largest reading that is let pass."""
        if self._floor is None:
            return dtype_mismatch_limit(self._config)
        return max(_LEAST_LIMIT, _TIMES_FLOOR * self._floor)

    @property
    def reading(self) -> float | None:
        """Of the newest publication, that of the engine which differed most."""
        is_compared = self._expected is not None and self._expected.num_rows and not self._is_off
        return self._latest if is_compared else None

    @property
    def is_rising(self) -> bool:
        """Whether the last readings are well above the floor, though each was let pass."""
        if self._floor is None or len(self._readings) < _NUM_READINGS:
            return False
        return float(np.median(self._readings)) > max(_LEAST_LIMIT, _TIMES_FLOOR_RISEN * self._floor)

    async def measure_floor(self, trainer: Trainer, engines: Sequence[Engine]) -> None:
        """Take the floor, while trainer and engines hold the checkpoint that both began with.

        Raises:
            MismatchError: They differ by more than any right implementations of the dtypes do.
        """
        expected = await trainer.canary()
        for engine in engines if expected.num_rows else ():
            try:
                found = await engine.score(expected.ids_BT)
            except EngineDiedError:  # whoever watches it replaces it
                continue
            if not found.num_rows:
                self._is_off = True
                return
            reading = _difference(found, expected)
            if not reading <= dtype_mismatch_limit(self._config):
                raise MismatchError(
                    f"{engine.name} and the trainer differ by {reading:.3g} nats a token on the checkpoint that both "
                    f"began with, more than {dtype_mismatch_limit(self._config):g}; one of them computes this model "
                    "otherwise: choose another model, or set trainer.max_mismatch"
                )
            self._floor = max(reading, self._floor or 0.0)

    async def expect(self, trainer: Trainer) -> None:
        """Note what a publication that was just written must give."""
        self._expected = await trainer.canary()
        if self._expected.num_rows and self._latest:
            self._readings.append(self._latest)
        self._latest = 0.0

    async def prove(self, engine: Engine) -> None:
        """Return if an engine that has loaded the publication computes what the trainer does.

        Raises:
            MismatchError: It does not.
            EngineDiedError: It died.
        """
        expected = self._expected
        if self._is_off or expected is None or not expected.num_rows:
            return
        reading = _difference(await engine.score(expected.ids_BT), expected)
        if not reading <= self.limit:
            floor = "no floor was taken" if self._floor is None else f"{self._floor:.3g} at the checkpoint"
            raise MismatchError(
                f"{engine.name} took weights {engine.version} whole and computes with others: on fixed tokens it "
                f"differs from the trainer by {reading:.3g} nats a token, more than {self.limit:.3g} ({floor}); its "
                "log may say what it did with them"
            )
        self._latest = max(self._latest, reading)


def _difference(found: Canary, expected: Canary) -> float:
    return float(np.abs(found.logprobs_BT.astype(np.float64) - expected.logprobs_BT).mean())
