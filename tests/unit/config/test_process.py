"""Settings of a machine or a call: environment variables, and what holds without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourstroke.config import process_settings

NAMES = ("FOURSTROKE_CACHE", "FOURSTROKE_SHM", "FOURSTROKE_STARTED_UNIX", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")

    settings = process_settings()

    assert settings.cache_dir == Path("/home/someone/.cache/fourstroke")
    assert settings.shared_memory_dir == Path("/dev/shm")
    assert settings.started_unix is None


def test_each_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("/a", "/b", "1700000000", "/c"), strict=True):
        monkeypatch.setenv(name, value)

    settings = process_settings()

    assert (settings.cache_dir, settings.shared_memory_dir) == (Path("/a"), Path("/b"))
    assert settings.started_unix == 1_700_000_000.0


def test_the_cache_follows_the_desktop_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")

    assert process_settings().cache_dir == Path("/c/fourstroke")
