"""Settings and hooks for the whole suite: in CI a test that is skipped for want of a part fails.

A test that needs a part which may be absent skips itself with a reason that begins with ``missing:``. On a developer's
machine that is fine; with ``CI=true`` it is a hole in the suite, so that the skip is reported as a failure.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# Its deadline is of the wall clock, which a loaded machine does not keep.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")

pytest_plugins = ["pytester"]


def _fail_if_hole(name: str, report: pytest.TestReport | pytest.CollectReport) -> None:
    is_in_ci = os.environ.get("CI", "").lower() in ("1", "true")
    reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
    if is_in_ci and report.outcome == "skipped" and reason.startswith("missing:"):
        report.outcome, report.longrepr = "failed", f"{name} was skipped in CI for want of a part: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip for a missing part into a failure in CI."""
    report = yield
    _fail_if_hole(item.nodeid, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole module that skips itself."""
    report = yield
    _fail_if_hole(collector.nodeid, report)
    return report
