"""Which engine gets a request. The strategy is a pure function; the router only counts what is under way.

    generate(request) -> least_loaded(names, outstanding) -> engine.generate(request)
                    '--> no engine may be routed to: wait until ``route`` names one

An engine is in the table only while the fleet says so: one that does not hold the present weights is unknown here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from fourstroke.errors import EngineDiedError
from fourstroke.types import Completion, Sampler, SampleRequest


def least_loaded(names: Sequence[str], outstanding: Mapping[str, int]) -> str:
    """The name with the fewest samples under way; of equal ones the first.

    Example:
        >>> least_loaded(["vllm-0", "vllm-1"], {"vllm-0": 8})
        'vllm-1'
    """
    return min(names, key=lambda name: outstanding.get(name, 0))


class Router:
    """Spreads requests over engines; satisfies ``types.Sampler``.

    Example:
        >>> router = Router()
        >>> router.route([engine])  # doctest: +SKIP
        >>> await router.generate(request)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._engines: dict[str, Sampler] = {}
        self._dead: set[str] = set()
        self._outstanding: Counter[str] = Counter()
        self._changed = asyncio.Event()

    @property
    def name(self) -> str:
        """Name where a sampler has one; completions carry that of their engine."""
        return "router"

    def route(self, engines: Sequence[Sampler]) -> None:
        """From now on send requests to these engines alone; what is under way stays where it is."""
        self._engines = {engine.name: engine for engine in engines if engine.name not in self._dead}
        self._note()

    def _note(self) -> None:
        if self._engines:
            self._changed.set()
        else:
            self._changed.clear()

    async def generate(self, request: SampleRequest) -> tuple[Completion, ...]:
        """Sample on the engine with the least to do.

        Raises:
            EngineDiedError: That engine died before it answered.
        """
        name, engine = await self._pick()
        self._outstanding[name] += request.num_samples
        try:
            with self._noticing_death(name):
                return await engine.generate(request)
        finally:
            self._outstanding[name] -= request.num_samples

    async def generate_together(self, requests: Sequence[SampleRequest]) -> tuple[tuple[Completion, ...], ...]:
        """Sample all requests on one engine, in an order that repeats."""
        name, engine = await self._pick()
        with self._noticing_death(name):
            return await engine.generate_together(requests)

    @contextmanager
    def _noticing_death(self, name: str) -> Iterator[None]:
        """Send nothing more to an engine that died, even before the fleet says so: names are never used again."""
        try:
            yield
        except EngineDiedError:
            self._dead.add(name)
            self._engines.pop(name, None)
            self._note()
            raise

    async def _pick(self) -> tuple[str, Sampler]:
        await self._changed.wait()
        name = least_loaded(list(self._engines), self._outstanding)
        return name, self._engines[name]
