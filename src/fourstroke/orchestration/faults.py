"""What to raise when several things fail together: the first cause alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
