"""A configuration that notes which of its leaves are read, to find options that nothing reads."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

SectionT = TypeVar("SectionT", bound=BaseModel)


def recording(config: SectionT) -> tuple[SectionT, set[str]]:
    """An equal configuration, and the dotted names of its leaves that were read since.

    Example:
        >>> from fourstroke.config import RunConfig
        >>> config, read = recording(RunConfig())
        >>> config.trainer.learning_rate, config.num_steps
        (1e-06, 100)
        >>> sorted(read)
        ['num_steps', 'trainer.learning_rate']
    """
    read: set[str] = set()
    return _recorded(config, prefix="", read=read), read


def leaves(config: BaseModel, *, prefix: str = "") -> set[str]:
    """Dotted names of all leaves."""
    names: set[str] = set()
    for name in type(config).model_fields:
        value = getattr(config, name)
        names |= leaves(value, prefix=f"{prefix}{name}.") if isinstance(value, BaseModel) else {f"{prefix}{name}"}
    return names


def _recorded(section: SectionT, *, prefix: str, read: set[str]) -> SectionT:
    fields = type(section).model_fields

    class Recorded(type(section)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in fields and not isinstance(value, BaseModel):
                read.add(prefix + name)
            return value

    values: dict[str, Any] = {}
    for name in fields:
        value = getattr(section, name)
        values[name] = _recorded(value, prefix=f"{prefix}{name}.", read=read) if isinstance(value, BaseModel) else value
    recorded: SectionT = Recorded.model_construct(**values)
    return recorded
