"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it.

Code under test uses ``loop.time``, ``asyncio.sleep`` and ``asyncio.timeout`` as ever; an hour of waiting takes
milliseconds and comes out the same each time. Threads and real sockets do not belong in such a test.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingWillHappenError(RuntimeError):
    """All tasks wait and no timer is set: in real time this program would hang for ever."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that, where the loop would sleep, moves the loop's clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise NothingWillHappenError("every task waits for another and no timer is set")
        self.now += max(timeout, 0.0)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, from 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds of virtual time since the loop was made."""
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time.

    Example:
        >>> async def nap() -> float:
        ...     await asyncio.sleep(3600)
        ...     return asyncio.get_running_loop().time()
        >>> run_virtual(nap())
        3600.0
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
