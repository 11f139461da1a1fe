"""Simulated runs keep their ledgers in memory, where there is a folder of that kind."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fourstroke.config import process_settings
from fourstroke.testing.simulation import simulate


@pytest.fixture
def simulated():
    """Runs a seed in a folder of its own."""
    memory = process_settings().shared_memory_dir

    def run(seed):
        with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            return simulate(seed, Path(folder))

    return run
