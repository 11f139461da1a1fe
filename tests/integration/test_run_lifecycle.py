"""Real runs of a tiny model through real Ray, real vLLM and the real command: how they end, and what they leave."""

import json
import signal

import psutil
import pytest

from fourstroke.config import RunConfig
from fourstroke.errors import RunFolderError
from fourstroke.observability import utc_now
from fourstroke.store import RunFolder, RunStatus, read_events, read_metrics, read_summary
from fourstroke.store.checkpoints import checkpoints

pytestmark = pytest.mark.timeout(900)

ENDLESS = {"num_steps": 10_000, "evaluation": {"before": False, "after": False}}


def steps_beyond(running, num_steps):
    """Wait until the run has done more steps than that."""
    return running.wait_for(lambda: running.place.num_steps() > num_steps)


def test_a_run_goes_from_evaluation_to_summary(place):
    running = place.train(num_steps=3)
    code, output, errors = running.end()

    assert code == 0, errors
    assert errors == ""
    folder = place.run_folder()
    assert output.splitlines()[-1] == f"{folder}/"
    summary = read_summary(folder / "summary.json")
    assert summary.status is RunStatus.FINISHED
    assert summary.num_steps == 3
    assert summary.before.num_tasks == summary.after.num_tasks == 4
    assert 0 < summary.train_seconds < summary.total_seconds
    assert 100e6 < summary.peak_memory_bytes < 8e9
    audit = place.audit()
    assert (audit.drawn, audit.trained, audit.dropped, audit.pending, audit.balanced) == (12, 12, 0, 0, True)
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["train/staleness/lag_max"] == 0 for record in records)
    # In float32 engine and trainer agree before the first update, and after each one: the weights that were published
    # are the weights that are sampled from, the tied output matrix included.
    assert all(record["train/mismatch/mean_abs_log_ratio"] < 1e-4 for record in records)
    assert all(record["train/optim/grad_norm"] > 0 for record in records)
    events = read_events(folder / "events.jsonl")
    assert [event.fields["step"] for event in events if event.kind == "weights_landed"] == [1, 2, 3]
    assert (folder / "curves.png").stat().st_size > 10_000
    assert checkpoints(folder / "checkpoints") == [2, 3]
    assert (folder / "models" / "step-000003" / "model.safetensors").exists()
    assert place.leftovers() == []

    code, output, _ = place.start("ledger", "audit", folder, "--json").end()
    assert code == 0
    assert json.loads(output)["balanced"] is True
    assert json.loads(output)["lags"] == {"0": 12}


def stop_politely(running):
    """SIGTERM: the run ends cleanly."""
    running.process.send_signal(signal.SIGTERM)
    code, _, errors = running.end()
    assert code == 130
    assert errors.splitlines() == [
        "stopping; once more to kill",
        f"error: stopped; go on with: fourstroke resume {running.place.run_folder()}",
    ]
    assert read_summary(running.place.run_folder() / "summary.json").status is RunStatus.INTERRUPTED


def stop_twice(running):
    """A second Ctrl-C, while the engine stands still so that the first one's clean end cannot come."""
    running.named("EngineActor").suspend()
    running.process.send_signal(signal.SIGINT)
    assert running.process.stderr.readline() == "stopping; once more to kill\n"
    # Nearer together they are taken for one.
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(running.process.pid).wait(timeout=1)
    running.process.send_signal(signal.SIGINT)
    code, _, errors = running.end()
    assert code == 130
    folder = running.place.run_folder()
    assert errors == f"error: the run was killed (signal 2); go on with: fourstroke resume {folder}\n"


def kill_driver(running):
    running.driver().kill()
    code, _, errors = running.end()
    assert code == 128 + signal.SIGKILL
    folder = running.place.run_folder()
    assert errors == f"error: the run was killed (signal 9); go on with: fourstroke resume {folder}\n"


def kill_guardian(running):
    """Nobody is left to tell or to tidy: the next run sweeps."""
    running.process.kill()
    code, _, _ = running.end()
    assert code == -signal.SIGKILL


def kill_raylet(running):
    _kill_daemon(running, "raylet")


def kill_gcs_server(running):
    _kill_daemon(running, "gcs_server")


def _kill_daemon(running, name):
    daemon = running.named(f"/{name} ")
    daemon.kill()
    code, _, errors = running.end()
    assert code == 5
    (sentence,) = errors.splitlines()
    assert sentence.startswith(f"error: Ray's {name} (process {daemon.pid}) is gone, and every part of the run with it")


def end_and_resume(place, endings):
    """One run that is ended in each of these ways after at least one more step, and then goes on to its last."""
    for number, ending in enumerate(endings):
        before = place.num_steps()
        running = place.train(**ENDLESS) if number == 0 else place.resume()
        steps_beyond(running, before)

        ending(running)

        assert place.audit().balanced
        assert place.leftovers() == [] or ending is kill_guardian
    last = max([0, *checkpoints(place.run_folder() / "checkpoints")]) + 2  # the first may not be whole yet
    running = place.resume(sets=["--set", f"num_steps={last}"])
    code, _, errors = running.end()
    assert code == 0, errors
    audit = place.audit()
    assert (audit.trained, audit.dropped, audit.balanced) == (4 * last, 0, True)
    assert place.leftovers() == []


def test_a_run_that_is_stopped_goes_on(place):
    end_and_resume(place, [stop_politely, stop_twice])


@pytest.mark.slow
@pytest.mark.parametrize("ending", [kill_driver, kill_guardian, kill_raylet, kill_gcs_server])
def test_a_run_whose_surroundings_are_killed_goes_on(place, ending):
    end_and_resume(place, [ending])


def test_a_second_run_on_the_folder_is_refused(place):
    running = place.train(**ENDLESS)
    folder = running.wait_for(place.found_run_folder)
    running.wait_for(lambda: (folder / "lock").read_text().strip() == str(running.process.pid))

    with pytest.raises(RunFolderError, match=str(running.process.pid)):
        RunFolder.create_at(folder, RunConfig(), now=utc_now())
    code, _, errors = place.start("resume", folder).end()

    assert code == 4
    assert errors == (
        f"error: {folder} is in use by a run with process id {running.process.pid}; wait for it, stop it, or choose "
        "another folder\n"
    )
