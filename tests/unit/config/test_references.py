"""User code by import path: found, checked against its signature before anything starts, and called late."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import pytest

from fourstroke.config import load_config, resolve_reference
from fourstroke.errors import ConfigError


@pytest.fixture
def graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module of user code."""
    name = "user_graders_of_a_test"
    (tmp_path / f"{name}.py").write_text(
        "calls = []\nnumber = 3\n\ndef exact(*, tolerance=0.0):\n    calls.append(tolerance)\n    return tolerance\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_the_function_is_called_with_its_arguments() -> None:
    call = resolve_reference("grader.use", "fractions:Fraction", arguments={"numerator": 1, "denominator": 2})

    assert call() == Fraction(1, 2)


def test_nothing_is_called_before_its_time(graders: str) -> None:
    call = resolve_reference("grader.use", f"{graders}:exact", arguments={"tolerance": 0.5})
    calls = sys.modules[graders].calls

    assert calls == []
    assert call() == 0.5
    assert calls == [0.5]


def test_arguments_that_do_not_fit_are_refused_with_the_signature(graders: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^grader\.use = .*'tolerence'.*; its signature is exact\(\*, tolerance=0\.0\)$"
    ):
        resolve_reference("grader.use", f"{graders}:exact", arguments={"tolerence": 0.5})


@pytest.mark.parametrize("attribute", ["missing", "number"])
def test_what_is_no_function_is_refused(graders: str, attribute: str) -> None:
    with pytest.raises(ConfigError, match=f"has no function '{attribute}'; name one that it has"):
        resolve_reference("grader.use", f"{graders}:{attribute}", arguments={})


def test_a_module_that_is_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.use = 'no_such_module:f' cannot be imported: ModuleNotFoundError"):
        resolve_reference("tasks.use", "no_such_module:f", arguments={})


def test_a_module_that_fails_is_attributed_to_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module_of_a_test.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ConfigError, match=r"cannot be imported: ZeroDivisionError") as caught:
        resolve_reference("tasks.use", "broken_module_of_a_test:f", arguments={})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "text", ["fractions.Fraction", "fractions:", ":Fraction", "fractions:a.b", "1x:y", "os:system()"]
)
def test_a_reference_has_one_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^tasks\.use = .* does not have the form "):
        load_config({"tasks": {"use": text}})
