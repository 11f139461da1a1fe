"""Parts of a real run that are killed in its middle: it goes on by itself, says so, and loses nothing."""

import pytest

from fourstroke.store import RunStatus, read_events, read_metrics, read_summary

pytestmark = pytest.mark.timeout(900)

# A part's process by its title, what its successor is called, and whose death the policy sees.
PARTS = {
    "engine": ("EngineActor", "vllm-1", "engine_died"),
    "core": ("EngineCore", "vllm-1", "engine_died"),
    "worker": ("WorkerActor", "worker-1", "worker_died"),
    "trainer": ("Placed", "trainer", "trainer_died"),
}
NUM_STEPS = 40


def events_of(place, kind):
    folder = place.found_run_folder()
    return [event for event in read_events(folder / "events.jsonl") if event.kind == kind] if folder else []


def kill_and_await_successor(running, part):
    """Kill a part once another step is done, and wait until the run says that it has been replaced."""
    place, title = running.place, PARTS[part][0]
    num_steps, num_replaced = place.num_steps(), len(events_of(place, "part_replaced"))
    running.wait_for(lambda: place.num_steps() > num_steps)
    running.named(title).kill()
    running.wait_for(lambda: len(events_of(place, "part_replaced")) > num_replaced)


def finish(running, *, staleness, num_steps):
    code, _, errors = running.end()
    place = running.place
    assert code == 0, errors
    assert errors == ""
    folder, audit = place.run_folder(), place.audit()
    assert read_summary(folder / "summary.json").status is RunStatus.FINISHED
    assert (audit.trained, audit.dropped, audit.pending, audit.balanced) == (4 * num_steps, 0, 0, True)
    assert audit.max_lag <= staleness
    assert audit.attempts_pending == 0
    assert [record["step"] for record in read_metrics(folder / "metrics.jsonl")] == list(range(1, num_steps + 1))
    last = place.witnessed()
    assert sum(len(keys) for keys in last.values()) == len({key for keys in last.values() for key in keys})
    assert place.leftovers() == []


def test_engine_worker_and_trainer_are_killed_in_one_run(place):
    running = place.train(num_steps=NUM_STEPS, rollout={"staleness": 1}, evaluation={"before": False, "after": False})

    for part in ("engine", "worker", "trainer"):
        kill_and_await_successor(running, part)
    finish(running, staleness=1, num_steps=NUM_STEPS)

    replaced = [event.fields for event in events_of(place, "part_replaced")]
    assert [fields["part"] for fields in replaced] == ["vllm-0", "worker-0", "trainer"]
    assert [fields["successor"] for fields in replaced] == ["vllm-1", "worker-1", "trainer"]
    faults = [event.fields for event in events_of(place, "fault") if "part" in event.fields]
    assert [fields["fault"] for fields in faults] == ["engine_died", "worker_died", "trainer_died"]
    assert all("process" in fields["reason"] for fields in faults)
    assert place.audit().incarnations == 2  # the trainer's death opened one


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_killed_twice_is_replaced_twice(place, part, deterministic):
    running = place.train(
        num_steps=NUM_STEPS, deterministic=deterministic, evaluation={"before": False, "after": False}
    )

    for _ in range(2):
        kill_and_await_successor(running, part)
    finish(running, staleness=0, num_steps=NUM_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_killed_during_an_evaluation_is_replaced(place, part):
    file = place.folder / "hung"
    grader = {
        "use": "graders:hanging",
        "arguments": {"group": "e-001-i000003", "file": str(file)},
    }
    running = place.train(num_steps=2, grader=grader, deadlines={"grade_s": 60})

    running.wait_for(file.exists)  # the evaluation before is at its last group
    running.named(PARTS[part][0]).kill()
    finish(running, staleness=0, num_steps=2)

    successor = PARTS[part][1]
    assert [event.fields["successor"] for event in events_of(place, "part_replaced")] == [successor]


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_stops_the_run_with_a_sentence(place):
    running = place.train(
        num_steps=10_000,
        supervision={"max_replacements": 1},
        evaluation={"before": False, "after": False},
    )
    kill_and_await_successor(running, "core")
    steps = place.num_steps()
    running.wait_for(lambda: place.num_steps() > steps)
    running.named("EngineCore").kill()

    code, _, errors = running.end()

    assert code == 5
    (sentence,) = errors.splitlines()
    assert sentence.startswith("error: vllm-1: process EngineCore")
    assert "signal 9" in sentence
    assert read_summary(place.run_folder() / "summary.json").status is RunStatus.FAILED
    code, _, errors = place.resume(sets=["--set", f"num_steps={place.num_steps() + 2}"]).end()
    assert code == 0, errors
    assert place.audit().balanced
