"""The wall clock: the one file of the package that may touch it.

Everything else takes its time from the event loop, which tests and the simulator replace, or as an argument. Wall time
is for names and records only (the run folder's name, ``created`` in ``run.json``, seconds since make's first line); no
decision may rest on it.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


def utc_now() -> datetime:
    """Date and time now, with the UTC zone attached.

    Example:
        >>> utc_now().tzname()
        'UTC'
    """
    return datetime.now(UTC)


def unix_now() -> float:
    """Seconds since 1970 now.

    Example:
        >>> unix_now() > 1.7e9
        True
    """
    return time.time()


def monotonic_s() -> float:
    """Seconds of a clock that never goes back, from an unknown origin: for threads without an event loop.

    Example:
        >>> monotonic_s() <= monotonic_s()
        True
    """
    return time.monotonic()
