"""What to raise when several things fail together, and how work ends when what goes on beside it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def first_cause() -> Iterator[None]:
    """Raise, in place of a group of errors, the first of them.

    Example:
        >>> with first_cause():
        ...     raise ExceptionGroup("both loops failed", [ValueError("first"), KeyError("second")])
        Traceback (most recent call last):
        ValueError: first
    """
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def work_under_watch(work: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]) -> None:
    """Do the work while others go on beside it; they end with it, and it ends when one of them fails.

    Raises:
        BaseException: What failed first; of two that failed together, what went on beside.
    """
    working = asyncio.create_task(work, name="work")
    others = [asyncio.create_task(other) for other in beside]
    try:
        done, _ = await asyncio.wait([working, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=lambda task: task is working):
            task.result()
    finally:
        for task in (working, *others):
            task.cancel()
        await asyncio.gather(working, *others, return_exceptions=True)
