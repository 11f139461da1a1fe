"""Claim: at staleness 2 the quickstart learns to within 0.05 of synchronous training, and no group lags by more than 2.

    python benchmarks/staleness.py             seeds 0, 1 and 2, synchronous and at S = 2; about ten minutes each
    python benchmarks/staleness.py --run FOLDER ...    runs that are finished already, of both kinds and equal seeds

The difference of held-out accuracy is paired by task (each task's mean over seeds and samples, S = 0 minus S = 2), and
its one-sided 95 % bound is of the t distribution over tasks. Lags are those of the ledgers.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from report import report, run_quickstart
from scipy import stats

from fourstroke.store import Ledger, RunFolder

CLAIM = "quickstart at staleness 2: held-out accuracy within 0.05 of staleness 0 (one-sided 95 %), lag at most 2"
MARGIN = 0.05
STALENESS = (0, 2)


def facts_of(folder: Path) -> dict[str, Any]:
    """Seed, staleness, scores by task, lags and times of one run."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    after = json.loads((folder / "evaluations" / "after.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    ledger = Ledger(RunFolder.open(folder).ledger_path, is_read_only=True)
    audit = ledger.audit()
    ledger.close()
    return {
        "seed": config["seed"],
        "staleness": config["rollout"]["staleness"],
        "scores": after["scores"],
        "after": after["estimate"],
        "train_seconds": summary["train_seconds"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "lags": audit.lags,
        "balanced": audit.balanced,
    }


def compare(facts: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of the paired differences S = 0 minus S = 2 over tasks, and its one-sided upper bound."""
    by_task: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for fact in facts:
        for task, scores in fact["scores"].items():
            by_task[task][fact["staleness"]] += scores
    synchronous, stale = STALENESS
    differences = np.array([np.mean(task[synchronous]) - np.mean(task[stale]) for task in by_task.values()])
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    bound = differences.mean() + stats.t.ppf(0.95, len(differences) - 1) * error
    return {
        "accuracy_lost": float(differences.mean()),
        "upper_bound_95": float(bound),
        "num_tasks": len(differences),
    }


def main() -> None:
    """Run, or read, both kinds and judge the claim."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--run"]:
        folders = [Path(folder) for folder in arguments[1:]]
    else:
        # The evaluation before training is the same for both kinds.
        folders = [
            run_quickstart(seed=seed, rollout__staleness=staleness, evaluation__before="false")
            for seed in (0, 1, 2)
            for staleness in STALENESS
        ]
    facts = [facts_of(folder) for folder in folders]
    seeds = {staleness: sorted(f["seed"] for f in facts if f["staleness"] == staleness) for staleness in STALENESS}
    assert seeds[0] == seeds[2], seeds
    lags: Counter[int] = Counter()
    for fact in facts:
        if fact["staleness"]:
            lags.update(fact["lags"])
    comparison = compare(facts)
    figures = {
        **comparison,
        "lag_histogram": {str(lag): lags[lag] for lag in sorted(lags)},
        "runs": [{name: value for name, value in fact.items() if name != "scores"} for fact in facts],
        "holds": {
            "within_margin": comparison["upper_bound_95"] < MARGIN,
            "lag_at_most_2": max(lags) <= STALENESS[1],
            "balanced": all(fact["balanced"] for fact in facts),
        },
    }
    report(CLAIM, figures, into="staleness")


if __name__ == "__main__":
    main()
