"""Recorded runs and a client of the application over them."""

import pytest

from fourstroke.dashboard.runs import Runs
from fourstroke.testing.recorded_run import RecordedRun, record_run


@pytest.fixture
def runs_dir(tmp_path, monkeypatch):
    # No tokenizer that happens to lie on this machine.
    monkeypatch.setenv("FOURSTROKE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "runs"


@pytest.fixture
def served(runs_dir):
    """Serves what a test records."""
    pytest.importorskip("starlette", reason="missing: starlette")
    from starlette.testclient import TestClient

    from fourstroke.dashboard.app import make_app

    def serve(*recorded: RecordedRun, token=None, base_url="http://127.0.0.1:8765"):
        paths = [record_run(runs_dir, one) for one in recorded]
        app = make_app(Runs([runs_dir]), token=token)
        return TestClient(app, base_url=base_url, raise_server_exceptions=True), [path.name for path in paths]

    return serve
