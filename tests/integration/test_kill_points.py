"""Runs that are killed (-9) at named points and resumed: nothing is lost or doubled, and where a run is to repeat bit
for bit, it does so through all of them.

Two chains go on side by side, since most of a start is the import of libraries on one core: each is one run that is
killed at one point after the other, and resumed by the real command. ``sabotage`` says what a point is.
"""

import contextlib
import hashlib
import importlib.util
import json
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fourstroke.observability import METRICS
from fourstroke.store import Ledger, RunStatus, read_events, read_metrics, read_payload, read_summary
from fourstroke.store.checkpoints import checkpoints
from fourstroke.types import Group

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="missing: vllm"),
    pytest.mark.timeout(2400),
]

# In the order in which one run meets them; the number says which call in a start.
POINTS = (
    "evaluation:2",
    "admission:3",
    "rollout:7",
    "grading:20",
    "prepare:3",
    "backward:4",
    "optimiser:2",
    "publication:30",
    "verification:50",
    "checkpoint:68",
    "commit:7",
    "shutdown:1",
)

# Of these at staleness 2; the long tests go through all twelve.
STALE_POINTS = ("grading:20", "optimiser:2", "commit:7")
STALE = {"num_steps": 14, "rollout": {"staleness": 2, "window": 3}}

# The long tests go through all the other points, and through each wait of the train loop.
MORE_POINTS = {
    "ledger": (
        *("open:1", "attempt:3", "admission-before:2", "storing:2", "receipt-before:2", "receipt:3"),
        *("commit-before:1", "commit-after:2", "open:1"),
    ),
    "storage": (
        *("checkpoint-unnamed:1", "checkpoint-named:1", "loaded:1", "loading:2", "retention:1", "verification:5"),
        *("export:1", "exported:1", "shutdown-ray:1", "summary:1"),
    ),
    "trainer": tuple(
        f"{when}-{verb}:2"
        for verb in ("prepare", "forward_backward", "optim_step", "publish", "save", "flush")
        for when in ("before", "after")
    ),
    "engine": tuple(
        f"{when}-{verb}:2"
        for verb in ("pause", "update_weights", "resume", "finish_step", "give_back")
        for when in ("before", "after")
    ),
}


def chain(place, points, **changes):
    """One run, killed at each point and resumed after it; the last start goes on to the end."""
    for number, point in enumerate((*points, None)):
        running = place.train(point=point, **changes) if number == 0 else place.resume(point=point)
        code, _, errors = running.end()
        assert place.leftovers() == []
        audit = place.audit()
        assert audit.balanced, (point, audit)
        assert audit.max_lag <= changes["rollout"]["staleness"], (point, audit)
        if point is None:
            assert code == 0, errors
        else:
            assert code == 128 + signal.SIGKILL, (point, code, errors)
            assert place.kills() == list(points[: number + 1])
            sentence = f"error: the run was killed (signal 9); go on with: fourstroke resume {place.run_folder()}"
            assert errors.splitlines()[-1] == sentence
    return place


def draws_of(folder):
    """Every row of the ledger's draws: which, in what order, trained in which step."""
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        return connection.execute(
            "SELECT key, task_id, seed, state, step, admitted_version, trained_version, lag FROM draws ORDER BY key"
        ).fetchall()


def trained_groups(folder):
    """Ids, log-probabilities, versions and scores of every group that was trained, by key and member."""
    with contextlib.closing(Ledger(folder / "ledger.sqlite", is_read_only=True)) as ledger:
        references = ledger.references()
    members = {}
    for key, reference in references.items():
        for member in read_payload(folder / "payload", reference, Group).members:
            episode = member.episode
            reply = episode.spans[-1]
            members[key, episode.member] = (
                [span.ids.tolist() for span in episode.spans],
                reply.logprobs.tobytes(),
                reply.versions,
                episode.stop,
                member.verdict.score,
            )
    return members


def digests(folder):
    """Digest of each file of the exported model and of the checkpoints' tensors."""
    files = [*folder.glob("models/*/model.safetensors"), *folder.glob("checkpoints/*/trainer.safetensors")]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def repeating_metrics(folder):
    """Records by step, without what depends on the machine's speed."""
    records = read_metrics(folder / "metrics.jsonl")
    return [
        {name: value for name, value in record.items() if name == "step" or not METRICS[name].is_timing}
        for record in records
    ]


def evaluations(folder):
    """Reports by file, without their duration."""
    reports = {file.name: json.loads(file.read_text()) for file in sorted(folder.glob("evaluations/*.json"))}
    for report in reports.values():
        del report["seconds"]
    return reports


@pytest.fixture(scope="module")
def futures(make_place, larger_model):
    """Four pieces of work, two at a time."""
    exact = {"deterministic": True, "rollout": {"staleness": 0}, "checkpoint": {"every_steps": 2}}
    work = {
        "killed": (POINTS, exact),
        "stale": (STALE_POINTS, STALE),
        "first": ((), exact),
        "second": ((), exact),
    }
    places = {name: make_place(name, model=larger_model) for name in work}
    pool = ThreadPoolExecutor(2)
    yield {name: pool.submit(chain, places[name], points, **changes) for name, (points, changes) in work.items()}
    for place in places.values():
        place.close()
    pool.shutdown()


def check_stale(place, *, num_incarnations):
    """Every draw of 14 steps is trained once, by the ledger and by the trainer's own account."""
    folder, audit = place.run_folder(), place.audit()
    assert read_summary(folder / "summary.json").status is RunStatus.FINISHED
    assert (audit.trained, audit.dropped, audit.pending, audit.balanced) == (56, 0, 0, True)
    assert (audit.attempts_used, audit.attempts_pending) == (56, 0)
    assert audit.max_lag <= 2
    assert audit.incarnations == num_incarnations
    assert [record["step"] for record in read_metrics(folder / "metrics.jsonl")] == list(range(1, 15))
    # What the trainer last read for a step is what is in the weights.
    last = place.witnessed()
    assert sorted(key for keys in last.values() for key in keys) == sorted(row[0] for row in draws_of(folder))
    assert last == {step: [row[0] for row in draws_of(folder) if row[4] == step] for step in range(1, 15)}
    assert any(event.kind == "group_reused" for event in read_events(folder / "events.jsonl"))


def test_a_run_at_staleness_2_that_is_killed_loses_and_doubles_nothing(futures):
    check_stale(futures["stale"].result(), num_incarnations=len(STALE_POINTS) + 1)


@pytest.mark.slow
def test_a_run_at_staleness_2_that_is_killed_at_each_point_loses_and_doubles_nothing(make_place, larger_model):
    place = make_place("stale-all", model=larger_model)

    chain(place, POINTS, **STALE)

    check_stale(place, num_incarnations=len(POINTS))  # all starts but the first, whose evaluation was killed


@pytest.mark.parametrize("other", ["second", "killed"])
def test_deterministic_runs_agree_bit_for_bit(futures, other):
    first, again = (futures[name].result().run_folder() for name in ("first", other))

    assert draws_of(again) == draws_of(first)
    assert len(draws_of(first)) == 24
    groups = trained_groups(first)
    assert len(groups) == 96
    assert trained_groups(again) == groups
    assert repeating_metrics(again) == repeating_metrics(first)
    assert len(repeating_metrics(first)) == 6
    assert evaluations(again) == evaluations(first)
    assert set(evaluations(first)) == {"before.json", "after.json"}
    assert digests(again) == digests(first)
    assert checkpoints(first / "checkpoints") == [4, 6]


def test_the_chain_met_what_it_was_to_meet(futures):
    """A comparison of runs that do not learn, or never sampled a thing, would prove nothing."""
    folder = futures["killed"].result().run_folder()

    records = repeating_metrics(folder)
    assert all(record["train/optim/grad_norm"] > 0 for record in records)
    assert len({record["reward/grade/score_mean"] for record in records}) > 1
    assert np.unique([member[1] for member in trained_groups(folder).values()]).size > 90


LONG = {"num_steps": 30, "evaluation": {"before": False}}


@pytest.fixture(scope="module")
def long_reference(make_place, larger_model):
    place = make_place("long", model=larger_model)
    chain(place, (), deterministic=True, rollout={"staleness": 0}, checkpoint={"every_steps": 2}, **LONG)
    return place.run_folder()


@pytest.mark.slow
@pytest.mark.parametrize("points", MORE_POINTS.values(), ids=MORE_POINTS)
def test_deterministic_runs_agree_through_more_points(make_place, larger_model, long_reference, points):
    place = make_place("more", model=larger_model)

    chain(place, points, deterministic=True, rollout={"staleness": 0}, checkpoint={"every_steps": 2}, **LONG)

    folder = place.run_folder()
    assert draws_of(folder) == draws_of(long_reference)
    assert trained_groups(folder) == trained_groups(long_reference)
    assert repeating_metrics(folder) == repeating_metrics(long_reference)
    assert evaluations(folder) == evaluations(long_reference)
    assert digests(folder) == digests(long_reference)


@pytest.mark.slow
@pytest.mark.parametrize("points", MORE_POINTS.values(), ids=MORE_POINTS)
def test_runs_at_staleness_2_lose_and_double_nothing_at_more_points(make_place, larger_model, points):
    place = make_place("more", model=larger_model)

    chain(place, points, rollout={"staleness": 2, "window": 3}, **LONG)

    audit, last = place.audit(), place.witnessed()
    assert (audit.trained, audit.dropped, audit.pending, audit.balanced) == (120, 0, 0, True)
    assert last == {step: [row[0] for row in draws_of(place.run_folder()) if row[4] == step] for step in range(1, 31)}
