"""A whole run on fakes, in real time, with sinks: one that fails is said once and stops nothing."""

import asyncio
import importlib.util
import os
import socket

import pytest

from fourstroke.config import load_config
from fourstroke.observability import EventKind, utc_now
from fourstroke.orchestration.training_run import TrainingRun
from fourstroke.store import RunFolder, RunStatus, read_events, read_metrics
from fourstroke.testing.engine import FakeEngineSettings
from fourstroke.testing.environment import FakeTaskset, ParityGrader
from fourstroke.testing.run import FakeParts, SilentReporter, prepared_on_fakes
from fourstroke.testing.trainer import FakeTrainer


def _run(tmp_path, **sinks):
    config = load_config(
        {
            "num_steps": 2,
            "runs_dir": str(tmp_path / "runs"),
            "rollout": {"groups_per_step": 2, "group_size": 4, "max_tokens": 8},
            "evaluation": {"samples_per_task": 2},
            "engine": {"max_model_len": 64},
            "trainer": {"microbatch_tokens": 64},
            "sinks": sinks,
        }
    )
    folder, reporter, taskset = RunFolder.create(config, now=utc_now()), SilentReporter(), FakeTaskset(num_train=6)
    engine = FakeEngineSettings(vocab_size=128, max_model_len=64, token_s=1e-4)
    parts = FakeParts(taskset=taskset, grader=ParityGrader(), engine=engine, trainers=[FakeTrainer(verb_s=0.0)])
    prepared = prepared_on_fakes(folder, config, taskset=taskset)
    summary = asyncio.run(TrainingRun(prepared, reporter=reporter, makers=parts, root_pid=os.getpid()).run())
    folder.close()
    failed = [
        event.fields["detail"] for event in read_events(folder.events_path) if event.kind is EventKind.SINK_FAILED
    ]
    return summary, folder, reporter, failed


def _needs(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"missing: {module}")


def test_a_failing_sink_stops_nothing_and_is_said_once(tmp_path):
    _needs("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        summary, folder, reporter, failed = _run(tmp_path, use=["prometheus"], prometheus_port=taken.getsockname()[1])

    assert summary.status is RunStatus.FINISHED
    assert [record["step"] for record in read_metrics(folder.metrics_path)] == [1, 2]
    assert ["sink prometheus: OSError" in detail for detail in failed] == [True]
    assert [note for note in reporter.notes if note.startswith("sink ")] == failed


def test_a_sink_has_the_numbers_of_the_folder(tmp_path):
    _needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder, _, failed = _run(tmp_path, use=["tensorboard"])

    assert failed == []
    accumulator = EventAccumulator(str(folder.sinks_dir / "tensorboard"), size_guidance={"tensors": 0})
    accumulator.Reload()
    for record in read_metrics(folder.metrics_path):
        for name, value in record.items():
            if name != "step":
                values = {e.step: e.tensor_proto.float_val[0] for e in accumulator.Tensors(name)}
                assert values[record["step"]] == pytest.approx(value, rel=1e-6), name
    (before,) = (e for e in accumulator.Tensors("evaluation/before/score_mean"))
    assert before.step == 0
