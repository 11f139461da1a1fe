"""Sinks: the feed with fakes that fail, hang and lag, and each sink against its real library."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import urllib.request

import pytest

from fourstroke.config import SinksConfig
from fourstroke.errors import PreflightError
from fourstroke.observability import Event, EventKind
from fourstroke.observability.sinks import SinkFeed, SinkSite, check_sinks, feed

HOSTILE = "\x1b[2J<script>\u202e"
RECORD = {"step": 1, "reward/grade/score_mean": 0.25, "train/loss/loss": -0.5}


def _event(kind, **fields):
    return Event(kind=kind, time_s=1.0, fields=fields)


def _site(folder, *use, **keys):
    return SinkSite(
        run="20261130T133000Z-demo",
        folder=folder,
        settings={"seed": 3, "rollout": {"group_size": 8, "note": "x" * 10_000}},
        config=SinksConfig(use=use, **keys),
    )


def _needs(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"missing: {module}")


class FakeSink:
    """Keeps what it is told; ``gate`` holds it up, ``fails_at`` breaks it."""

    def __init__(self, *, gate=None, fails_at=None):
        self.told, self.ended, self.gate, self.fails_at = [], [], gate, fails_at

    def numbers(self, step, values):
        if self.gate:
            self.gate.wait()
        if step == self.fails_at:
            raise OSError(f"no route {HOSTILE}")
        self.told.append((step, dict(values)))

    def close(self, *, is_finished):
        self.ended.append(is_finished)


def _feed(tmp_path, **sinks):
    return SinkFeed(_site(tmp_path, *sinks), make=lambda name, _site: sinks[name])


def test_a_sink_is_told_records_counts_and_evaluations_and_no_text(tmp_path):
    sink = FakeSink()
    fed = _feed(tmp_path, wandb=sink)

    fed.event(_event(EventKind.EVALUATED, name="before", mean=0.125, version=0))
    fed.event(_event(EventKind.EPISODE_FAILED, episode="e0.1", detail=HOSTILE))
    fed.record(RECORD)
    fed.event(_event(EventKind.RUN_ENDED, status="finished", reason=""))
    asyncio.run(fed.close())

    counts = {"events/episode_failed": 1.0, "events/evaluated": 1.0}
    assert sink.told == [
        (0, {"evaluation/before/score_mean": 0.125}),
        (1, {"reward/grade/score_mean": 0.25, "train/loss/loss": -0.5, **counts}),
        (1, {**counts, "events/run_ended": 1.0}),
    ]
    assert sink.ended == [True]
    assert fed.problems() == []


def test_a_failing_sink_is_said_once_and_the_others_go_on(tmp_path):
    broken, whole = FakeSink(fails_at=2), FakeSink()
    fed = _feed(tmp_path, wandb=broken, mlflow=whole)

    for step in (1, 2, 3):
        fed.record({**RECORD, "step": step})
    asyncio.run(fed.close())

    (problem,) = fed.problems()
    assert problem.startswith("sink wandb: OSError: no route ")
    assert problem.endswith("the run goes on without it, and its folder has everything")
    assert [step for step, _ in broken.told] == [1]
    assert [step for step, _ in whole.told] == [1, 2, 3]
    assert (broken.ended, whole.ended) == ([], [False])
    assert fed.problems() == []


def test_a_sink_that_cannot_be_opened_is_a_problem_and_no_error(tmp_path):
    def make(_name, _site):
        raise ImportError("no library")

    fed = SinkFeed(_site(tmp_path, "wandb"), make=make)
    fed.record(RECORD)
    asyncio.run(fed.close())

    assert [problem.partition(";")[0] for problem in fed.problems()] == ["sink wandb: ImportError: no library"]


def test_a_hanging_sink_holds_up_neither_the_run_nor_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, "_MOST_QUEUED", 3)
    monkeypatch.setattr(feed, "_CLOSE_S", 0.1)
    gate = threading.Event()
    lagging, hanging = FakeSink(gate=gate), FakeSink(gate=gate)
    many, few = _feed(tmp_path, wandb=lagging), _feed(tmp_path, mlflow=hanging)

    for step in range(1, 9):
        many.record({**RECORD, "step": step})
    few.record(RECORD)
    asyncio.run(few.close())

    assert ["3 records wait for it" in problem for problem in many.problems()] == [True]
    assert ["did not end within" in problem for problem in few.problems()] == [True]
    gate.set()


def test_a_missing_library_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())

    check_sinks(SinksConfig(use=("tensorboard", "mlflow")))
    with pytest.raises(PreflightError, match=r"sinks\.use names 'wandb', and wandb is not installed; install it"):
        check_sinks(SinksConfig(use=("mlflow", "wandb")))


# --- real libraries -------------------------------------------------------------------------------------------------


def _drive(site):
    """A run of two steps, of which the second came again after a resume; no problem."""
    for statuses in (("interrupted", (1, 2)), ("finished", (2, 3))):
        fed = SinkFeed(site)
        for step in statuses[1]:
            fed.record({**RECORD, "step": step, "train/loss/loss": -step / 2})
        fed.event(_event(EventKind.RUN_ENDED, status=statuses[0], reason=HOSTILE))
        asyncio.run(fed.close())
        assert fed.problems() == []


def test_tensorboard_reads_what_was_written(tmp_path):
    _needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _drive(_site(tmp_path, "tensorboard"))

    accumulator = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    accumulator.Reload()
    losses = [(event.step, event.tensor_proto.float_val[0]) for event in accumulator.Tensors("train/loss/loss")]
    assert losses[-2:] == [(2, -1.0), (3, -1.5)]
    assert "events/run_ended" in accumulator.Tags()["tensors"]


def _wandb_records(data):
    """Records of a log of LevelDB's format after a header of 7 bytes: blocks of 32 KiB of crc (4), length (2), type."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_wandb_writes_an_offline_run(tmp_path):
    _needs("wandb")
    from wandb.proto import wandb_internal_pb2

    _drive(_site(tmp_path, "wandb"))

    files = sorted((tmp_path / "wandb").rglob("*.wandb"))
    assert files
    losses = []
    for file in files:
        for data in _wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss/loss" in items:
                losses.append((int(items["step"]), float(items["train/loss/loss"])))
    assert losses == [(1, -0.5), (2, -1.0), (2, -1.0), (3, -1.5)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow", "ignore::sqlalchemy.exc.SADeprecationWarning")
def test_mlflow_has_one_run_with_every_step(tmp_path):
    _needs("mlflow")
    _needs("sqlalchemy")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    _drive(_site(tmp_path, "mlflow", mlflow_uri=uri))

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("fourstroke").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, -0.5), (2, -1.0), (2, -1.0), (3, -1.5)]
    assert (run.info.run_name, run.info.status) == ("20261130T133000Z-demo", "FINISHED")
    assert run.data.params["rollout.group_size"] == "8"
    assert len(run.data.params["rollout.note"]) == 6000


def test_prometheus_fetches_the_latest_numbers(tmp_path):
    _needs("prometheus_client")
    from fourstroke.observability.sinks.prometheus import open_sink

    sink = open_sink(_site(tmp_path, "prometheus", prometheus_port=0))
    for step in (1, 2):
        sink.numbers(step, {"train/loss/loss": -step / 2, "events/fault": float("nan")})
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sink.close(is_finished=True)

    assert 'fourstroke_train_loss_loss{run="20261130T133000Z-demo"} -1.0' in text
    assert 'fourstroke_step{run="20261130T133000Z-demo"} 2.0' in text
    assert 'fourstroke_events_fault{run="20261130T133000Z-demo"} NaN' in text


def test_a_taken_port_is_a_problem_and_no_error(tmp_path):
    _needs("prometheus_client")
    from fourstroke.observability.sinks.prometheus import open_sink

    holder = open_sink(_site(tmp_path, "prometheus", prometheus_port=0))
    fed = SinkFeed(_site(tmp_path, "prometheus", prometheus_port=holder.port))
    asyncio.run(fed.close())
    holder.close(is_finished=True)

    assert ["sink prometheus: OSError" in problem for problem in fed.problems()] == [True]
