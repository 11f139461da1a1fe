"""The hook of ``conftest.py``: a skip for a missing part is a failure in CI, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

_TEST = """
import pytest

def test_part():
    pytest.skip("missing: a browser")

def test_other():
    pytest.skip("only on Tuesdays")
"""


@pytest.mark.parametrize(("ci", "failed", "skipped"), [("true", 1, 1), ("", 0, 2)])
def test_a_test_skipped_for_a_missing_part_fails_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, failed: int, skipped: int
) -> None:
    monkeypatch.setenv("CI", ci)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text().replace('["pytester"]', "[]"))
    pytester.makepyfile(_TEST)

    pytester.runpytest().assert_outcomes(failed=failed, skipped=skipped)


@pytest.mark.parametrize(("ci", "errors", "skipped"), [("true", 1, 0), ("", 0, 1)])
def test_a_module_skipped_for_a_missing_part_fails_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, errors: int, skipped: int
) -> None:
    monkeypatch.setenv("CI", ci)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text().replace('["pytester"]', "[]"))
    pytester.makepyfile("import pytest\npytest.skip('missing: bubblewrap', allow_module_level=True)")

    pytester.runpytest().assert_outcomes(errors=errors, skipped=skipped)
