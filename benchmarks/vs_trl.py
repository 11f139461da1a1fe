"""Claim: a step of GRPO takes at most a third of the time that TRL's GRPOTrainer takes for the same work.

    python benchmarks/vs_trl.py              the comparison, under 40 minutes
    python benchmarks/vs_trl.py --settings   what TRL does with each of the settings that we tried for it

Both train the 135M model on the same prompts with the same recorded scores, with replies of a fixed length, one step of
the one after a step of the other; each waits without using the processor while the other works. Ours is a whole run of
the real command: processes, ledger, store, publication and its canary. A step of ours is measured from when its first
environment is let through until the next step's first environment opens, which is after the new weights have landed;
TRL's from before its sampling until after its optimiser. The first steps of both are warm-up.

    quickstart    16 prompts x 8 replies x 24 tokens, 10 of 16 groups mixed: rows without gradient are skipped by ours
    no_skip       the same with all groups mixed, so that nothing can be skipped
    long_prompt   8 prompts of 256 tokens x 8 replies x 128 tokens, 5 of 8 groups mixed

TRL has an environment of its own under the cache folder, made by this script from ``benchmarks/trl.txt``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from recorded import Work
from report import ROOT, report

from fourstroke.config import process_settings
from fourstroke.environments import arithmetic
from fourstroke.tokens.render import Renderer
from fourstroke.trainer.catalogue import resolve_model

CLAIM = "against TRL: a step of the same work takes at most a third of the time (speedup at least 3)"
MODEL = "smollm2-135m-instruct"
SYSTEM = "Answer briefly."
GROUP_SIZE = 8
NUM_PAIRS = 5
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
DEADLINE_S = 1800.0

# The fastest of those in results/vs_trl_settings.json.
TRL_SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "bf16": False, "per_device_train_batch_size": 32}
TRIED: tuple[dict[str, Any], ...] = (
    {"dtype": "float32", "bf16": False, "per_device_train_batch_size": 32},
    {"dtype": "float32", "bf16": True, "per_device_train_batch_size": 32},
    *({"dtype": "bfloat16", "bf16": False, "per_device_train_batch_size": size} for size in (8, 16, 32, 64, 128)),
    {
        "dtype": "bfloat16",
        "bf16": False,
        "per_device_train_batch_size": 32,
        "use_transformers_continuous_batching": True,
    },
    {"dtype": "bfloat16", "bf16": False, "per_device_train_batch_size": 32, "cache_implementation": "static"},
    {"dtype": "bfloat16", "bf16": False, "per_device_train_batch_size": 32, "optim": "adamw_torch"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much work a step is.

    Attributes:
        num_prompts: Groups.
        num_prompt_tokens: Length that each prompt is filled up to, or 0 to leave it.
        num_new_tokens: Of each reply.
        num_mixed: Of each kind of step, in turn, how many groups have unequal scores.
    """

    num_prompts: int
    num_prompt_tokens: int
    num_new_tokens: int
    num_mixed: tuple[int, ...]


SHAPES = {
    "quickstart": Shape(num_prompts=16, num_prompt_tokens=0, num_new_tokens=24, num_mixed=(10, 16)),
    "long_prompt": Shape(num_prompts=8, num_prompt_tokens=256, num_new_tokens=128, num_mixed=(5,)),
}


def make_work(shape: Shape, model_path: Path) -> Work:
    """Prompts of arithmetic, filled up where asked, and scores that are mixed in as many groups as asked."""
    texts = [task.prompt[-1].content for task in arithmetic().train[: shape.num_prompts]]
    if shape.num_prompt_tokens:
        texts = [_filled(text, shape.num_prompt_tokens, renderer=Renderer(model_path)) for text in texts]
    scores = []
    for num_mixed in shape.num_mixed:
        rng = np.random.default_rng(0)
        table = np.zeros((shape.num_prompts, GROUP_SIZE))
        for group in rng.permutation(shape.num_prompts)[:num_mixed]:
            table[group, rng.permutation(GROUP_SIZE)[: rng.integers(1, GROUP_SIZE)]] = 1.0
        scores.append(table.tolist())
    return Work(system=SYSTEM, prompts=texts, scores=scores)


def _filled(text: str, num_tokens: int, *, renderer: Renderer) -> str:
    work = Work(system=SYSTEM, prompts=[], scores=[])
    missing = num_tokens - len(renderer.prompt_ids(work.messages(text)))
    filled = "Read this first:" + " word" * (missing - 5) + ". " + text
    while len(renderer.prompt_ids(work.messages(filled))) < num_tokens:
        filled = filled.replace(":", ": word", 1)
    assert len(renderer.prompt_ids(work.messages(filled))) == num_tokens, filled
    return filled


# --- ours -------------------------------------------------------------------------------------------------------------


class OurRun:
    """A run of the real command that waits at the gate before each step."""

    def __init__(self, folder: Path, shape: Shape, work_path: Path, *, num_steps: int) -> None:
        self._gate = folder / "gate"
        self._gate.mkdir()
        context = max(128, shape.num_prompt_tokens + shape.num_new_tokens)
        keys = {
            "runs_dir": folder / "runs",
            # One more than is let through: its first environment tells that the last one is over.
            "num_steps": num_steps + 1,
            "tasks.use": "recorded:tasks",
            "tasks.arguments": json.dumps({"work": str(work_path), "gate": str(self._gate)}),
            "grader.use": "recorded:grader",
            "grader.arguments": json.dumps({"work": str(work_path)}),
            "rollout.groups_per_step": shape.num_prompts,
            "rollout.max_tokens": shape.num_new_tokens,
            "rollout.ignore_eos": "true",
            "engine.max_model_len": context,
            "trainer.learning_rate": 1e-6,
            "trainer.microbatch_tokens": max(1024, 2 * context),
            "evaluation.before": "false",
            "evaluation.after": "false",
            "checkpoint.every_steps": 1000,
            "deadlines.group_s": 3600,
        }
        command = [sys.executable, "-m", "fourstroke.cli", "train", "quickstart"]
        for key, value in keys.items():
            command += ["--set", f"{key}={value}"]
        self._log = (folder / "run.log").open("wb")
        path = os.pathsep.join(filter(None, (str(ROOT / "benchmarks"), str(ROOT / "src"))))
        environment = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self._log, stderr=subprocess.STDOUT)

    def wait_until_ready(self) -> None:
        """Return once the first step is at the gate."""
        self._wait_for("arrived", 0)

    def step(self, number: int) -> float:
        """Seconds of one step."""
        (self._gate / f"permitted-{number}").touch()
        self._wait_for("arrived", number + 1)
        began, over = (
            json.loads((self._gate / name).read_text()) for name in (f"began-{number}", f"arrived-{number + 1}")
        )
        return float(over - began)

    def close(self) -> None:
        """End the run."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._log.close()

    def _wait_for(self, what: str, number: int) -> None:
        path, deadline = self._gate / f"{what}-{number}", time.monotonic() + DEADLINE_S
        while not path.exists():
            assert self._process.poll() is None, Path(self._log.name).read_text()[-4000:]
            assert time.monotonic() < deadline, f"{path} did not come"
            time.sleep(0.05)


# --- TRL --------------------------------------------------------------------------------------------------------------


def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made if it is not there."""
    requirements = ROOT / "benchmarks" / "trl.txt"
    folder = process_settings().cache_dir / "benchmarks" / "trl"
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if not stamp.exists() or stamp.read_bytes() != requirements.read_bytes():
        print(f"installing {requirements.name} into {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        if subprocess.run([*pip, TORCH], check=False).returncode:
            subprocess.run([*pip, "--index-url", TORCH_INDEX, TORCH], check=True)
        subprocess.run([*pip, "-r", requirements], check=True)
        shutil.copyfile(requirements, stamp)
    return python


class TrlRun:
    """TRL in its own process, one step at each line."""

    def __init__(
        self, folder: Path, shape: Shape, *, work_path: Path, model_path: Path, num_steps: int, settings: dict[str, Any]
    ) -> None:
        spec = {
            "model": str(model_path),
            "work": str(work_path),
            "num_new_tokens": shape.num_new_tokens,
            "num_steps": num_steps,
            "settings": settings,
            "output": str(folder / "trl"),
        }
        (folder / "trl.json").write_text(json.dumps(spec))
        self._log = (folder / "trl.log").open("wb")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [trl_python(), Path(__file__).with_name("trl_arm.py"), folder / "trl.json"],
            env={**environment, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )

    def wait_until_ready(self) -> None:
        """Return once the model is loaded."""
        self._answer()

    def step(self) -> dict[str, float]:
        """Seconds of one step, and the most memory so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, Path(self._log.name).read_text()[-4000:]
        answer: dict[str, float] = json.loads(line)
        return answer


# --- the comparison ---------------------------------------------------------------------------------------------------


class Pair:
    """Both programs on one shape of work."""

    def __init__(self, folder: Path, shape: Shape, model_path: Path, *, num_pairs: int) -> None:
        work_path = folder / "work.json"
        work_path.write_bytes(msgspec.json.encode(make_work(shape, model_path)))
        self._num_kinds = len(shape.num_mixed)
        self._ours = OurRun(folder, shape, work_path, num_steps=(num_pairs + 1) * self._num_kinds)
        self._trl = TrlRun(
            folder, shape, work_path=work_path, model_path=model_path, num_steps=num_pairs + 1, settings=TRL_SETTINGS
        )
        self._number = 0

    def __enter__(self) -> Self:
        """Wait until both are ready."""
        self._ours.wait_until_ready()
        self._trl.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        """End both."""
        self._trl.close()
        self._ours.close()

    def step(self) -> dict[str, Any]:
        """One step of TRL, and one of ours for each kind of step."""
        trl = self._trl.step()
        ours = [self._ours.step(self._number + kind) for kind in range(self._num_kinds)]
        self._number += self._num_kinds
        return {"trl_s": trl["seconds"], "trl_peak_bytes": trl["peak_bytes"], "ours_s": ours}


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of this benchmark's own."""
    with tempfile.TemporaryDirectory(prefix="fourstroke-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def compare(shape: Shape, model_path: Path) -> list[dict[str, Any]]:
    """Seconds of each pair of steps."""
    pairs = []
    with scratch() as folder, Pair(folder, shape, model_path, num_pairs=NUM_PAIRS) as both:
        both.step()
        for _ in range(NUM_PAIRS):
            pairs.append(both.step())
            print(json.dumps(pairs[-1]), flush=True)
    return pairs


def speedup(pairs: list[dict[str, Any]], *, kind: int) -> float:
    """Median of the pairs' ratios."""
    return statistics.median(pair["trl_s"] / pair["ours_s"][kind] for pair in pairs)


def compare_settings(model_path: Path) -> None:
    """One step of TRL, after one of warm-up, with each of the settings."""
    shape, found = SHAPES["quickstart"], []
    for settings in TRIED:
        with scratch() as folder:
            work_path = folder / "work.json"
            work_path.write_bytes(msgspec.json.encode(make_work(shape, model_path)))
            trl = TrlRun(folder, shape, work_path=work_path, model_path=model_path, num_steps=3, settings=settings)
            try:
                trl.wait_until_ready()
                trl.step()
                found.append({**settings, "seconds": min(trl.step()["seconds"] for _ in range(2))})
            except AssertionError as error:
                found.append({**settings, "failed": str(error).strip().splitlines()[-1][:300]})
            finally:
                trl.close()
        print(json.dumps(found[-1]), flush=True)
    report("settings of TRL that were tried on the quickstart's step", {"tried": found}, into="vs_trl_settings")


def main() -> None:
    """Compare and judge the claim."""
    model_path = resolve_model(MODEL, cache_dir=process_settings().cache_dir)
    if sys.argv[1:] == ["--settings"]:
        compare_settings(model_path)
        return
    started = time.monotonic()
    pairs = {name: compare(shape, model_path) for name, shape in SHAPES.items()}
    figures = {
        "speedup_quickstart": speedup(pairs["quickstart"], kind=0),
        "speedup_no_skip": speedup(pairs["quickstart"], kind=1),
        "speedup_long_prompt": speedup(pairs["long_prompt"], kind=0),
    }
    holds = {
        "speedup_quickstart": figures["speedup_quickstart"] >= 3,
        "speedup_long_prompt": figures["speedup_long_prompt"] >= 5,
    }
    minutes = (time.monotonic() - started) / 60
    report(
        CLAIM,
        {**figures, "minutes": minutes, "trl_settings": TRL_SETTINGS, "pairs": pairs, "holds": holds},
        into="vs_trl",
    )


if __name__ == "__main__":
    main()
