"""From a recipe or a YAML file and ``--set key=value`` to a checked :class:`RunConfig`, or one sentence on why not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from fourstroke.config.checks import cross_checks
from fourstroke.config.schema import RunConfig
from fourstroke.errors import ConfigError

# Knobs of other systems that would silently break training here, with what to do instead.
_REFUSED_KEYS = {
    "top_p": "it changes the support of the sampled distribution, so that the importance ratio is wrong at every token",
    "top_k": "it changes the support of the sampled distribution, so that the importance ratio is wrong at every token",
    "min_p": "it changes the support of the sampled distribution, so that the importance ratio is wrong at every token",
}

# YAML 1.1 reads 1e-6 as text; numbers are numbers here, as in YAML 1.2 and JSON.
_NUMBER = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$")


class _Loader(yaml.SafeLoader):
    """Safe YAML whose scientific notation is a number."""


class _Dumper(yaml.SafeDumper):
    """Its other side: a text that looks like such a number is quoted."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789."))


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader, which builds plain data only
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not valid YAML: {' '.join(str(error).split())}; mend it there") from error


def load_config(base: Mapping[str, Any] | RunConfig | Path, *, overrides: Iterable[str] = ()) -> RunConfig:
    """The checked configuration.

    Args:
        base: A recipe's result, plain data, or the path of a YAML file.
        overrides: ``key=value`` texts with dotted keys, applied in order; values are YAML.

    Raises:
        ConfigError: One sentence for each thing that is wrong, a line each.

    Example:
        >>> load_config({}, overrides=["trainer.learning_rate=1e-5"]).trainer.learning_rate
        1e-05
    """
    if isinstance(base, RunConfig):
        data = base.model_dump()
    elif isinstance(base, Path):
        data = _read_file(base)
    else:
        data = dict(base)
    for override in overrides:
        data = _apply_override(data, override)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(item) for item in error.errors())) from error
    problems = list(cross_checks(config))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; :func:`load_config` reads it back to an equal one."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; name a recipe or a YAML file")
    data = _parse_yaml(path.read_text(), str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__} at its top; write keys and values")
    return data


def _apply_override(data: dict[str, Any], override: str) -> dict[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r} has no '='; write --set key=value")
    value = _parse_yaml(text, f"the value of --set {key}")
    return _replaced(data, key.split("."), value)


def _replaced(data: Any, path: list[str], value: Any) -> dict[str, Any]:
    """A copy of ``data`` with the value at a dotted path replaced; a new bundle name drops the old bundle's terms."""
    branch = dict(data) if isinstance(data, dict) else {}
    head, *rest = path
    if rest == ["name"] and head == "algorithm":
        branch[head] = {"name": value}
    elif rest:
        branch[head] = _replaced(branch.get(head), rest, value)
    else:
        branch[head] = value
    return branch


def _sentence(item: Any) -> str:
    """One pydantic error as one sentence: key, value, mend."""
    path = [str(part) for part in item["loc"]]
    key, value = ".".join(path), item.get("input")
    if item["type"] == "extra_forbidden":
        if path[-1] in _REFUSED_KEYS:
            return f"{key} = {value!r} is refused: {_REFUSED_KEYS[path[-1]]}; remove it and use temperature alone"
        return f"{key} is not a known key; {_suggestion(path)}"
    if item["type"] == "no_bundle":
        return f"algorithm.name = {value.get('name')!r} is no bundle; {item['msg']}"
    if item["type"] == "string_pattern_mismatch":
        return f"{key} = {value!r} does not have the form {item['ctx']['pattern']}; change it to that"
    return f"{key} = {value!r} is refused: {item['msg'][0].lower() + item['msg'][1:]}; change it to that"


def _suggestion(path: list[str]) -> str:
    fields = _fields_at(path[:-1])
    close = difflib.get_close_matches(path[-1], fields, n=1, cutoff=0.5)
    if close:
        return f"did you mean {'.'.join([*path[:-1], close[0]])}?"
    return f"keys there are {', '.join(sorted(fields))}"


def _fields_at(path: list[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in path:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type), (path, annotation)
        assert issubclass(annotation, BaseModel), (path, annotation)
        model = annotation
    return list(model.model_fields)
