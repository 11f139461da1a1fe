"""Named waits: every await of the controller has a name and a deadline, and a late one says which it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fourstroke.errors import DeadlineError


@asynccontextmanager
async def within(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Bound a wait.

    Args:
        timeout_s: Seconds of the event loop's clock.
        what: What is waited for, so that the error reads as a sentence ("group e0000-i000012 to be sampled").

    Raises:
        DeadlineError: The body took longer. A ``TimeoutError`` of the body's own passes unchanged.

    Example:
        >>> async def stall():
        ...     async with within(0.01, "the trainer to answer"):
        ...         await asyncio.sleep(60)
        >>> asyncio.run(stall())
        Traceback (most recent call last):
        fourstroke.errors.DeadlineError: waited 0.01 s for the trainer to answer; raise its key under deadlines ...
    """
    try:
        async with asyncio.timeout(timeout_s) as bound:
            yield
    except TimeoutError as error:
        if not bound.expired():
            raise
        raise DeadlineError(
            f"waited {timeout_s:g} s for {what}; raise its key under deadlines if that is not long enough"
        ) from error
