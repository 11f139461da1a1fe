"""Named waits: every await that may last has a name and a deadline, and a late one says which it was.

    within(30 s, "group e0000-i000012") --> in the register while it lasts --> fourstroke why RUN
                                       '--> past its deadline: DeadlineError that names it

The register answers "what does each part wait for now"; nothing decides by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import msgspec

from fourstroke.errors import DeadlineError
from fourstroke.types import Wait


@dataclass(frozen=True, slots=True, eq=False)
class _Noted:
    """A wait in the register; compared by identity, since two may read alike."""

    what: str
    since_s: float
    deadline_s: float


class Waits:
    """The waits of one part, on the event loop's clock.

    Args:
        part: Name of the part.

    Example:
        >>> async def stall() -> None:
        ...     async with Waits("trainer").within(0.01, "the worker to answer"):
        ...         await asyncio.sleep(60)
        >>> asyncio.run(stall())
        Traceback (most recent call last):
        fourstroke.errors.DeadlineError: waited 0.01 s for the worker to answer; raise its key under deadlines ...
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._going: dict[_Noted, None] = {}

    @asynccontextmanager
    async def within(self, timeout_s: float, what: str) -> AsyncIterator[None]:
        """Bound a wait and note it.

        Args:
            timeout_s: Seconds of the event loop's clock.
            what: What is waited for, so that the error reads as a sentence ("group e0000-i000012 to be sampled").

        Raises:
            DeadlineError: The body took longer. A ``TimeoutError`` of the body's own passes unchanged.
        """
        try:
            with self.noted(what, deadline_s=timeout_s):
                async with asyncio.timeout(timeout_s) as bound:
                    yield
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise DeadlineError(
                f"waited {timeout_s:g} s for {what}; raise its key under deadlines if that is not long enough"
            ) from error

    @contextmanager
    def noted(self, what: str, *, deadline_s: float = 0.0) -> Iterator[None]:
        """Note a wait that somebody else bounds."""
        wait = _Noted(what, asyncio.get_running_loop().time(), deadline_s)
        self._going[wait] = None
        try:
            yield
        finally:
            del self._going[wait]

    def now(self) -> tuple[Wait, ...]:
        """The waits that go on, the longest first."""
        now_s = asyncio.get_running_loop().time()
        return tuple(
            Wait(part=self._part, what=wait.what, waited_s=now_s - wait.since_s, deadline_s=wait.deadline_s)
            for wait in self._going
        )


class WaitsReport(msgspec.Struct, frozen=True, kw_only=True):
    """``waits.json`` of a run folder: what each part waited for at one moment.

    Example:
        >>> WaitsReport(written_unix=1.8e9, pid=4711, phase="train", step=3, waits=()).step
        3
    """

    written_unix: float
    pid: int
    phase: str
    step: int
    waits: tuple[Wait, ...]


def describe_waits(waits: Iterable[Wait]) -> list[str]:
    """One line a wait, the longest first.

    Example:
        >>> describe_waits([Wait(part="batch", what="group e0-i1", waited_s=340.0, deadline_s=600.0)])
        ['batch waits for group e0-i1: 340 s, at most 600 s']
    """
    return [
        f"{wait.part} waits for {wait.what}: {wait.waited_s:.0f} s"
        + (f", at most {wait.deadline_s:g} s" * (wait.deadline_s > 0))
        for wait in sorted(waits, key=lambda wait: -wait.waited_s)
    ]
