"""User code by import path: ``module:function`` with arguments checked against its signature.

Such code is trusted, like a script that the user runs; it is imported only where it is used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import StringConstraints

from fourstroke.errors import ConfigError, boundary

Reference = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


def resolve_reference(key: str, reference: str, *, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """A call of ``reference`` with ``arguments``, not yet made.

    Args:
        key: The configuration key that holds the reference, for the error's text.
        reference: ``module:function``.
        arguments: Keyword arguments; checked against the function's signature here, before anything heavy starts.

    Raises:
        ConfigError: The module or function is missing, or the arguments do not fit.

    Example:
        >>> resolve_reference("grader.use", "fractions:Fraction", arguments={"numerator": 1, "denominator": 2})()
        Fraction(1, 2)
    """
    module_name, _, attribute = reference.partition(":")
    with boundary(f"{key} = {reference!r} cannot be imported", ConfigError):
        module = importlib.import_module(module_name)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{key} = {reference!r}: {module_name} has no function {attribute!r}; name one that it has")
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{key} = {reference!r} does not take the arguments {dict(arguments)!r}: {error}; "
            f"its signature is {attribute}{inspect.signature(function)}"
        ) from error

    def call() -> Any:
        return function(**arguments)

    return call
