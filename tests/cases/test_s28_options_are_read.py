"""S28: an option that is parsed but never read. Each leaf of the configuration is read in a run on fakes.

The heavy parts that a run on fakes leaves out are asked apart: what vLLM is started with, one real update of a tiny
model, the graders' processes, and the start-up checks.
"""

import importlib
import os
from pathlib import Path

import pytest
import torch

from fourstroke.algorithms.inputs import LossInputs
from fourstroke.algorithms.losses import bind_loss
from fourstroke.config import BUNDLES, load_config
from fourstroke.config.bundles import LOSS_KEYS
from fourstroke.engines.vllm import VllmEngine, engine_arguments
from fourstroke.errors import ConfigError
from fourstroke.observability import utc_now
from fourstroke.observability.sinks import SinkSite
from fourstroke.observability.sinks.feed import _LIBRARIES
from fourstroke.orchestration.actors import read_rows
from fourstroke.orchestration.batching import build_batches
from fourstroke.orchestration.preflight import HostFacts, check_host
from fourstroke.orchestration.training_run import TrainingRun, load_tasks
from fourstroke.rewards import GraderPool
from fourstroke.store import PayloadWriter, RunFolder
from fourstroke.testing.clock import run_virtual
from fourstroke.testing.engine import FakeEngineSettings
from fourstroke.testing.environment import ParityGrader
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.testing.recording import leaves, recording
from fourstroke.testing.run import FakeParts, SilentReporter, prepared_on_fakes, tiny_model
from fourstroke.testing.trainer import FakeTrainer
from fourstroke.trainer.catalogue import ModelFacts, resolve_model
from fourstroke.trainer.engine import TorchTrainer
from fourstroke.types import Batch, Microbatch

# Leaves that nothing above reads, each with why that is right. There is none.
EXEMPT: dict[str, str] = {}


def _config(tmp_path, model):
    return load_config(
        {
            "num_steps": 2,
            "runs_dir": str(tmp_path / "runs"),
            "model": {"name": str(model)},
            "rollout": {"groups_per_step": 2, "group_size": 2, "max_tokens": 4},
            "evaluation": {"num_tasks": 3, "samples_per_task": 2},
            "trainer": {"microbatch_tokens": 128, "num_threads": 1},
            "engine": {"max_model_len": 128},
            "sinks": {"mlflow_uri": f"sqlite:///{tmp_path}/mlflow.db", "prometheus_port": 0},
        }
    )


def _run_on_fakes(config):
    """A whole run, in which the trainer dies once."""
    taskset = load_tasks(config)
    folder = RunFolder.create(config, now=utc_now())
    parts = FakeParts(
        taskset=taskset,
        grader=ParityGrader(),
        engine=FakeEngineSettings(vocab_size=128, max_model_len=128),
        trainers=[FakeTrainer(dies_at_step=2)],
    )
    prepared = prepared_on_fakes(folder, config, taskset=taskset)
    run = TrainingRun(prepared, reporter=SilentReporter(), makers=parts, root_pid=os.getpid())
    summary = run_virtual(run.run())
    folder.close()
    assert summary.num_steps == 2
    assert summary.before is not None


def _one_real_update(config, tmp_path, model):
    trainer = TorchTrainer(
        config, model_path=model, publication_path=tmp_path / "weights", loss=bind_loss(config.algorithm)
    )
    trainer.start()
    group, writer = make_group([1.0, 0.0]), PayloadWriter(tmp_path)
    record = make_record(group, reference=writer.append(group))
    writer.close()
    (batch,) = build_batches([record], step=1, algorithm=config.algorithm, max_tokens=4)
    rows = Batch(
        step=1,
        rows=read_rows(batch, tmp_path),
        num_sequences=batch.num_sequences,
        num_loss_tokens=batch.num_loss_tokens,
    )
    trainer.forward_backward(trainer.prepare(rows), Microbatch(rows=(0, 1)))
    trainer.optim_step()
    trainer.publish(1, incarnation=0)
    trainer.close()


def _open_every_sink(config, tmp_path):
    site = SinkSite(run="run", folder=tmp_path / "sinks", settings={}, config=config.sinks)
    for name, library in _LIBRARIES.items():
        pytest.importorskip(library[0], reason=f"missing: {library[1]}")
        module = importlib.import_module(f"fourstroke.observability.sinks.{name}")
        module.open_sink(site).close(is_finished=True)


def _every_bundle():
    """What the terms of each bundle read, in a loss and in a batch."""
    read_by_any = set()
    one = torch.tensor([-1.0])
    inputs = LossInputs(
        logprobs_N=one,
        entropy_N=-one,
        behaviour_logprobs_N=one,
        proximal_logprobs_N=one,
        advantages_N=one,
        weight_N=-one,
        sequence_N=torch.tensor([0]),
        row_ids=("r0",),
    )
    for name, bundle in BUNDLES.items():
        terms = {"name": name, "entropy_coefficient": 0.1, "rejection": "token", "rejection_low": 0.5}
        config, read = recording(load_config({"algorithm": terms}))
        bind_loss(config.algorithm)(inputs)
        # Each reads what its entry says that it reads, and none of what others do.
        assert {key for key in LOSS_KEYS if f"algorithm.{key}" in read} == set(bundle.reads), name
        read_by_any |= read
    return read_by_any


def test_each_leaf_is_read(tmp_path):
    model = tiny_model(tmp_path / "model")
    plain = _config(tmp_path, model)
    config, read = recording(plain)

    resolve_model(config.model.name, cache_dir=tmp_path)
    _run_on_fakes(config)
    _one_real_update(config, tmp_path, model)
    _open_every_sink(config, tmp_path)
    GraderPool(config.grader, timeout_s=1.0, environment={}, log_path=tmp_path / "log")
    VllmEngine(config.engine, model, seed=config.seed)
    for on_gpu in (False, True):
        engine_arguments(config.engine, model, seed=config.seed, scratch=tmp_path, on_gpu=on_gpu)
    facts = HostFacts.gather(runs_dir=Path(config.runs_dir), shared_memory_dir=tmp_path)
    check_host(config, facts=facts, model=ModelFacts.read(model))

    assert leaves(plain) - read - _every_bundle() - set(EXEMPT) == set()


def test_the_recorder_sees_an_option_that_nothing_reads():
    plain = load_config({})
    config, read = recording(plain)

    assert config.trainer.learning_rate > 0

    assert leaves(plain) - read == leaves(plain) - {"trainer.learning_rate"}


def test_a_misspelt_key_fails_at_start_up_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"algorithm\.clip_ratoi is not a known key; did you mean algorithm\.clip_"):
        load_config({"algorithm": {"name": "grpo", "clip_ratoi": 0.2}})
