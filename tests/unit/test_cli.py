"""The command line as a user meets it: what it prints, its exit status, and what it does not load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fourstroke.config import RunConfig, load_config
from fourstroke.observability import WaitsReport, unix_now, utc_now
from fourstroke.store import Ledger, RunFolder
from fourstroke.testing.run import tiny_model
from fourstroke.types import Draw, Wait


def _fourstroke(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "fourstroke.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_dry_run_prints_and_writes_what_would_run_and_loads_nothing_heavy(tmp_path):
    code = (
        "import sys, fourstroke.cli as cli\n"
        "sys.argv = ['fourstroke', 'train', 'quickstart', '--dry-run', '--set', 'trainer.learning_rate=1e-4']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert done.returncode == 0, done.stderr
    written = tmp_path / "runs" / "quickstart.dry-run.yaml"
    assert written.read_text() == done.stdout
    assert yaml.safe_load(done.stdout)["trainer"]["learning_rate"] == 1e-4
    assert load_config(written).trainer.learning_rate == 1e-4
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["quickstart.dry-run.yaml"]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["train", "quickstart", "--set", "trainer.learning_rat=1"], 2, "did you mean trainer.learning_rate?"),
        (["train", "quickstart", "--set", "rollout.top_k=20"], 2, "rollout.top_k = 20 is refused"),
        (["train", "quickstrt"], 2, "neither a recipe (quickstart) nor a file"),
        (["train", "quickstart", "--set", "model.name=./nowhere"], 3, "model.name = './nowhere' is not a folder"),
        (
            ["train", "quickstart", "--set", "tasks.use=nowhere:tasks"],
            2,
            "tasks.use = 'nowhere:tasks' cannot be imported",
        ),
        (["train", "quickstart", "--set", "tasks.arguments={op: 1}"], 2, "does not take the arguments {'op': 1}"),
        (["ledger", "audit", "."], 4, "is no run folder"),
        (["eval", "."], 4, "is no run folder"),
        (["resume", "."], 4, "is no run folder"),
        (["resume", "nowhere"], 4, "nowhere is no run folder"),
        (["why", "."], 4, "is no run folder"),
        (["train", "quickstart", "--deterministic", "--set", "rollout.staleness=1"], 2, "cannot repeat bit for bit"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_status(tmp_path, arguments, status, text):
    done = _fourstroke(*arguments, cwd=tmp_path)

    assert done.returncode == status, done.stderr
    assert text in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert not list(Path(tmp_path).rglob("run.json"))


def test_an_audit_exits_with_0_where_it_balances(tmp_path):
    folder = RunFolder.create(RunConfig(name="demo", runs_dir=str(tmp_path)), now=utc_now())
    ledger = Ledger(folder.ledger_path)
    ledger.admit(Draw(epoch=0, index=0, task_id="t", seed=1), version=0)
    ledger.close()
    folder.close()

    done = _fourstroke("ledger", "audit", str(folder.path), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    fields = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert (fields["drawn"], fields["pending"], fields["balanced"]) == ("1", "1", "True")


def test_why_prints_the_longest_waits_first_and_says_how_many_more_there_are(tmp_path):
    folder = RunFolder.create(RunConfig(name="demo", runs_dir=str(tmp_path)), now=utc_now())
    waits = tuple(Wait(part="worker-0", what=f"request {n}", waited_s=float(n), deadline_s=0.0) for n in range(1, 24))
    folder.write_waits(WaitsReport(written_unix=0.0, pid=os.getpid(), phase="train", step=3, waits=waits))
    folder.close()

    done = _fourstroke("why", str(folder.path), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert f"(process {os.getpid()}) runs: train, step 3" in head
    assert lines[0] == "  worker-0 waits for request 23: 23 s"
    assert len(lines) == 21
    assert lines[-1] == "  and 3 that wait for less time; --json prints all"


# --- a run's folder -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path, model):
    """A run that another process (this one) holds, until it is closed."""
    config = load_config({"name": "demo", "runs_dir": str(tmp_path), "model": {"name": str(model)}})
    config = load_config(config, overrides=["engine.max_model_len=512", "engine.kv_cache_gib=0.1"])
    made = RunFolder.create(config, now=utc_now())
    yield made
    made.close()


def test_a_run_that_goes_on_is_not_resumed_beside_itself(folder, tmp_path):
    done = _fourstroke("resume", str(folder.path), cwd=tmp_path)

    assert done.returncode == 4, done.stderr
    assert f"{folder.path} is in use by a run with process id {os.getpid()}; wait for it" in done.stderr


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("seed=1", "seed = 1 cannot change when a run is resumed, since the run began with 0; leave it"),
        ("num_step=5", "did you mean num_steps?"),
    ],
)
def test_a_run_is_not_resumed_as_another_one(folder, tmp_path, setting, sentence):
    folder.close()

    done = _fourstroke("resume", str(folder.path), "--set", setting, cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert load_config(folder.config_path).seed == 0


def _waits(folder, *, pid):
    wait = Wait(part="worker-0", what="a grader", waited_s=340.0, deadline_s=600.0)
    other = Wait(part="controller", what="a free slot\x1b[2J", waited_s=12.0, deadline_s=0.0)
    folder.write_waits(WaitsReport(written_unix=unix_now() - 3, pid=pid, phase="train", step=7, waits=(other, wait)))


def test_why_prints_the_longest_wait_first(folder, tmp_path):
    _waits(folder, pid=os.getpid())

    done = _fourstroke("why", str(folder.path), cwd=tmp_path)

    head, *lines = done.stdout.splitlines()
    assert head.startswith(f"{folder.path.name} (process {os.getpid()}) runs: train, step 7, ")
    assert lines[0] == "  worker-0 waits for a grader: 340 s, at most 600 s"
    assert lines[1].startswith("  controller waits for a free slot")
    assert "\x1b" not in done.stdout


def test_why_says_that_a_run_is_not_running(folder, tmp_path):
    _waits(folder, pid=2**22 + 1)  # above the kernel's largest process id

    text = _fourstroke("why", str(folder.path), cwd=tmp_path).stdout
    report = json.loads(_fourstroke("why", str(folder.path), "--json", cwd=tmp_path).stdout)

    assert "is not running; this is what it last said: train, step 7" in text
    assert (report["is_alive"], report["step"], len(report["waits"])) == (False, 7, 2)


def test_why_of_a_run_that_never_came_so_far_says_so(folder, tmp_path):
    done = _fourstroke("why", str(folder.path), cwd=tmp_path)

    assert done.returncode == 4
    assert "waits.json is missing" in done.stderr
