"""Runs of the real control plane on fakes, each decided by a seed: 0 lost, 0 doubled, the bound never broken."""

import json
import os
import subprocess
import sys
from collections import Counter
from tempfile import TemporaryDirectory

import pytest

from fourstroke.orchestration.slots import Slots
from fourstroke.testing.network import Fate

CHUNK = 100


def _run(simulated, first):
    outcomes = [simulated(seed) for seed in range(first, first + CHUNK)]
    # A seed is the whole report: simulate(seed, folder) shows it again.
    assert [(outcome.seed, outcome.failures, outcome.faults) for outcome in outcomes if outcome.failures] == []
    return outcomes


@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_seeds(simulated, first):
    outcomes = _run(simulated, first)

    # The faults of each kind were there to be survived, and drivers were killed and resumed.
    kinds = Counter(fault.partition(" s ")[2].partition(":")[0] for outcome in outcomes for fault in outcome.faults)
    commits = {"killed before a commit", "killed after a commit"}
    assert kinds.keys() == {fate.value for fate in Fate if fate is not Fate.FINE} | commits
    assert sum(outcome.num_kills for outcome in outcomes) > 20
    assert sum(len(outcome.stops) for outcome in outcomes) > 10
    assert sum(bool(outcome.faults) and not outcome.num_kills and not outcome.stops for outcome in outcomes) > 5


@pytest.mark.slow
@pytest.mark.parametrize("first", range(300, 5300, CHUNK))
def test_many_seeds(simulated, first):
    _run(simulated, first)


def test_a_seed_replays_exactly(simulated):
    first, second = [simulated(seed) for seed in range(12)], [simulated(seed) for seed in range(12)]

    assert first == second
    assert len({outcome.trace for outcome in first}) == 12


def test_a_seed_replays_exactly_in_another_process(simulated):
    code = (
        "import json, sys, tempfile, pathlib\n"
        "from fourstroke.testing.simulation import simulate\n"
        "run = lambda seed: simulate(seed, pathlib.Path(tempfile.mkdtemp(dir=sys.argv[1]))).trace\n"
        "print(json.dumps([run(seed) for seed in range(6)]))"
    )

    def traces(folder, hash_seed):
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True, env=environment
        )
        return json.loads(done.stdout)

    expected = [simulated(seed).trace for seed in range(6)]

    with TemporaryDirectory() as folder:
        assert traces(folder, "1") == traces(folder, "2") == expected


def test_a_failing_seed_replays_exactly(simulated, monkeypatch):
    plain = Slots.__init__

    def one_more(self, **sizes):
        plain(self, **sizes)
        self._capacity += 1

    monkeypatch.setattr(Slots, "__init__", one_more)
    failing = next(outcome for outcome in map(simulated, range(50)) if outcome.failures)

    assert simulated(failing.seed) == failing
