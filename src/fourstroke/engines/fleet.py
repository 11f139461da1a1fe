"""All engines of a run: who may be routed to, how weights reach all of them, and how a dead one is replaced.

    starting --> catching up --> routable --> lost
                  (loads the newest publication, and proves its version)

Invariants: an engine is routable only while its own word is that it holds the fleet's version; a publication lands on
every routable engine or on none that stays routable; nothing writes the publication's buffer while an engine reads it
(one lock is held from before the trainer writes until the last engine has loaded). Decides nothing: whoever watches
calls ``replace`` or ``forget``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from fourstroke.errors import EngineDiedError, PublicationError
from fourstroke.types import Engine, Publication, WeightVersion

MakeEngine = Callable[[str, bool], Engine]
OnRoutable = Callable[[Sequence[Engine]], Awaitable[None]]
Prove = Callable[[Engine], Awaitable[None]]


class Fleet:
    """The engines of one run.

    Args:
        make: Makes an engine, not started, from its name and whether it is a replacement: one whose checkpoint is not
            what the run is at, so that it must be brought to the present weights.
        count: Number of engines.
        is_fresh: Whether the checkpoint that engines start from is the run's version 0.
        on_routable: Told of the engines that may be routed to, each time that they change.
        prove: Returns if an engine that has loaded a publication, and is still paused, computes what it must; without
            it, that it says to hold the publication is enough.

    Example:
        >>> fleet = Fleet(make, count=2, is_fresh=True, on_routable=worker.route, prove=prove)  # doctest: +SKIP
        >>> await fleet.start()  # doctest: +SKIP
        >>> await fleet.publish(lambda: trainer.publish(1, incarnation=0))  # doctest: +SKIP
    """

    def __init__(
        self, make: MakeEngine, *, count: int, is_fresh: bool, on_routable: OnRoutable, prove: Prove | None = None
    ) -> None:
        self._make = make
        self._prove = prove
        self._on_routable = on_routable
        self._is_fresh = is_fresh
        self._engines = {name: make(name, not is_fresh) for name in (f"vllm-{number}" for number in range(count))}
        self._started: set[str] = set()
        self._routable: set[str] = set()
        self._num_made = count
        self._version: WeightVersion | None = None
        # The newest publication, while its bytes are there to be read.
        self._publication: Publication | None = None
        self._has_published = False
        self._landing = asyncio.Lock()
        self._is_routable = asyncio.Event()

    @property
    def version(self) -> WeightVersion:
        """The weights that a request admitted now is sampled under."""
        assert self._version is not None, "no weights have landed yet"
        return self._version

    @property
    def has_published(self) -> bool:
        """Whether weights were ever sent, so that engines may hold others than they started with."""
        return self._has_published

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Every engine that was not lost, routable or not."""
        return tuple(self._engines.values())

    @property
    def started(self) -> tuple[Engine, ...]:
        """The engines that have started, routable or not, dead or alive."""
        return tuple(engine for name, engine in self._engines.items() if name in self._started)

    @property
    def routable(self) -> tuple[Engine, ...]:
        """The engines that hold the fleet's version."""
        return tuple(engine for name, engine in self._engines.items() if name in self._routable)

    async def start(self) -> None:
        """Start all engines. Those of a fresh run are routable at once, at version 0; others after a publication."""
        await asyncio.gather(*(engine.start() for engine in self.engines))
        self._started = set(self._engines)
        if self._is_fresh:
            self._version = self.engines[0].version
            self._routable = set(self._engines)
            await self._tell()

    async def publish(self, write: Callable[[], Awaitable[Publication]]) -> WeightVersion:
        """Have new weights written, and land them on every engine.

        An engine that dies on the way is no longer routable; the others go on. With none left this waits until one has
        been replaced: the replacement takes these weights.

        Args:
            write: Writes the publication into its buffer, whose last content no engine reads any more.

        Raises:
            PublicationError: An engine refused it, or says that it holds something else.
            MismatchError: An engine computes otherwise than the trainer.
        """
        async with self._landing:
            self._has_published, self._publication = True, None
            publication = await write()
            engines = self.started
            landed = await asyncio.gather(*(self._land(engine, publication) for engine in engines))
            self._publication, self._version = publication, publication.version
            self._routable = {engine.name for engine, is_there in zip(engines, landed, strict=True) if is_there}
            await self._tell()
        await self._is_routable.wait()
        return publication.version

    async def withdraw(self) -> None:
        """The bytes of the newest publication are about to go: an engine that starts now waits for the next one."""
        async with self._landing:
            self._publication = None

    async def replace(self, name: str) -> Engine:
        """Start an engine in place of a dead one and bring it to the present weights; until then nobody routes to it.

        Where there is nothing to bring it there with, because a new trainer has not published yet, it takes the next
        publication with all others.

        Raises:
            EngineDiedError: It cannot start.
            PublicationError: It did not take the present weights.
        """
        await self.forget(name)
        while True:
            successor = await self._started_successor()
            async with self._landing:
                # Weights may have landed while it started.
                publication = self._publication
                if publication is not None and _has_missed(successor, publication):
                    await self.forget(successor.name)
                    continue
                if publication is not None and not await self._land(successor, publication):
                    raise EngineDiedError(f"{successor.name} died while it took weights {publication.version}")
                self._started.add(successor.name)
                if publication is not None or self._is_at_start:
                    if successor.version != self.version:
                        raise PublicationError(f"{successor.name} holds {successor.version}, not {self.version}")
                    self._routable.add(successor.name)
                    await self._tell()
            return successor

    @property
    def _is_at_start(self) -> bool:
        """Whether an engine that starts from the checkpoint holds the fleet's version."""
        return self._is_fresh and not self._has_published

    async def _started_successor(self) -> Engine:
        successor = self._make(f"vllm-{self._num_made}", not self._is_at_start)
        self._num_made += 1
        self._engines[successor.name] = successor
        await successor.start()
        return successor

    async def forget(self, name: str) -> None:
        """Route nothing to an engine any more, and end what is left of it."""
        engine = self._engines.pop(name)
        self._routable.discard(name)
        try:
            await self._tell()
        finally:
            # Nobody else knows of it any more, so that it ends even if the telling does not.
            await engine.close()

    async def close(self) -> None:
        """End all engines. May be called twice."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def _land(self, engine: Engine, publication: Publication) -> bool:
        """Whether an engine now holds a publication; a dead one does not, one that holds something else is a fault."""
        try:
            await engine.pause()
            held = await engine.update_weights(publication)
            if held != publication.version:
                raise PublicationError(f"{engine.name} was sent version {publication.version} and holds {held}")
            if self._prove is not None:
                await self._prove(engine)
            await engine.resume()
        except EngineDiedError:
            return False
        return True

    async def _tell(self) -> None:
        if self._routable:
            self._is_routable.set()
        else:
            self._is_routable.clear()
        await self._on_routable(self.routable)


def _has_missed(engine: Engine, publication: Publication) -> bool:
    """Whether an engine that started as version 0 was overtaken by publications: only a replacement may skip some."""
    held, version = engine.version, publication.version
    return held.incarnation == version.incarnation and version.number > held.number + 1
