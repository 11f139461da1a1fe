"""What a reader asked in a URL, checked: a value that makes no sense is one sentence, never a silent default."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fourstroke.errors import ConfigError


class Query:
    """The query of a URL; an empty value is as good as none.

    Args:
        given: Values by name.

    Example:
        >>> Query({"step": "3", "task": ""}).whole("step")
        3
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = {name: value for name, value in given.items() if value}

    def text(self, name: str) -> str:
        """The value, or the empty text."""
        return self.given.get(name, "")

    def one_of(self, name: str, allowed: Sequence[str]) -> str:
        """The value, which must be one of some, or the empty text.

        Raises:
            ConfigError: It is none of them.
        """
        value = self.text(name)
        if value and value not in allowed:
            raise ConfigError(f"{name} = {value!r} is unknown; choose one of {', '.join(allowed)}")
        return value

    def whole(self, name: str) -> int | None:
        """The value as a whole number, or None.

        Raises:
            ConfigError: It is none, or has more than 15 digits.
        """
        value = self.number(name)
        if value is None:
            return None
        if value != int(value) or abs(value) >= 1e15:
            raise ConfigError(f"{name} = {self.text(name)!r} is no whole number; give one such as 3")
        return int(value)

    def number(self, name: str) -> float | None:
        """The value as a finite number, or None.

        Raises:
            ConfigError: It is none.
        """
        value = self.text(name)
        if not value:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"{name} = {value!r} is no number; give one such as 0.5")
        return number
