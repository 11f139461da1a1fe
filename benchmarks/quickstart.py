"""Claim: the quickstart learns. Held-out accuracy from under 0.25 to at least 0.7, intervals apart, on every seed.

    python benchmarks/quickstart.py [SEED ...]     seeds 0, 1 and 2 if none is named; about 15 minutes each

Each seed is a run of the real command in a process of its own; its figures are those of its ``summary.json``. Runs that
are named by ``--run FOLDER ...`` are taken as they are, so that a finished run need not be repeated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from report import report, run_quickstart

CLAIM = "quickstart: held-out accuracy from under 0.25 to at least 0.7 in under 12 minutes of training, under 8 GB"


def figures_of(folder: Path) -> dict[str, Any]:
    """What the claim needs of one run."""
    summary = json.loads((folder / "summary.json").read_text())
    config = (folder / "config.yaml").read_text()
    seed = next(int(line.partition(":")[2]) for line in config.splitlines() if line.startswith("seed:"))
    names = ("before", "after", "train_seconds", "total_seconds", "num_steps", "peak_memory_bytes")
    return {"seed": seed, **{name: summary[name] for name in names}}


def main() -> None:
    """Run the seeds and judge the claim."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--run"]:
        runs = [figures_of(Path(folder)) for folder in arguments[1:]]
    else:
        runs = [figures_of(run_quickstart(seed=int(seed))) for seed in arguments or ("0", "1", "2")]
    holds = {
        "before_under_0.25": all(run["before"]["mean"] < 0.25 for run in runs),
        "after_at_least_0.7": all(run["after"]["mean"] >= 0.7 for run in runs),
        "intervals_apart": all(run["before"]["high"] < run["after"]["low"] for run in runs),
        "training_within_12_min": all(run["train_seconds"] <= 720 for run in runs),
        "peak_under_8_gb": all(run["peak_memory_bytes"] < 8e9 for run in runs),
    }
    report(CLAIM, {"runs": runs, "holds": holds}, into="quickstart")


if __name__ == "__main__":
    main()
