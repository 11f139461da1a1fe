"""Public names, pinned: whoever removes or renames one edits this file, and so says it in the change."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import fourstroke.config
import fourstroke.errors
import fourstroke.types
from fourstroke.cli import app

TYPES = """
    Assignment Batch BatchRecord Column Canary Completion Draw Engine Environment Episode EpisodeRecord Estimate
    GradedEpisode Grader Group GroupRecord MaskReason Message Microbatch Observation PayloadReference Publication
    RefusedGroup RowRecord RowShape SampleRequest Sampler Scored Span StepStats StopReason Tamper Task Taskset
    TensorEntry Timings ToolCall Trainer Trajectory Unscored Verdict VersionRun Wait WeightVersion Worker decode
    decode_either encode
"""
CONFIG = """
    AlgorithmConfig BUNDLES Bundle CheckpointConfig DeadlinesConfig EngineConfig EvaluationConfig GraderConfig
    ModelConfig ProcessSettings Reference RolloutConfig RunConfig SinksConfig SupervisionConfig TaskConfig TrainerConfig
    dump_config load_config process_settings resolve_reference
"""
ERRORS = {
    "FourstrokeError": 1,
    "ConfigError": 2,
    "PreflightError": 3,
    "ModelNotFoundError": 3,
    "RunFolderError": 4,
    "EngineDiedError": 5,
    "ActorDiedError": 5,
    "ActorFailedError": 5,
    "ClusterDiedError": 5,
    "PublicationError": 6,
    "MismatchError": 6,
    "DeadlineError": 7,
    "CodecError": 1,
    "DataError": 1,
    "GradingError": 1,
    "SinkError": 1,
    "DoesNotFitError": 1,
    "TooManyDropsError": 8,
    "InterruptedRunError": 130,
}
# Command: arguments, then options.
COMMANDS = {
    "train": "source --set --deterministic --dry-run",
    "resume": "run --set",
    "why": "run --json",
    "eval": "source --set --json",
    "compare": "run other --json",
    "show": "run --json",
    "episodes": "run --step --min-score --max-score --stop --unscored --task --text --limit --json",
    "ledger audit": "run --json",
    "dashboard": "runs --host --port --token-file",
    "models list": "--json",
    "models get": "name",
    "version": "",
}


def test_names_of_types() -> None:
    assert sorted(fourstroke.types.__all__) == sorted(TYPES.split())


def test_names_of_config() -> None:
    assert sorted(fourstroke.config.__all__) == sorted(CONFIG.split())


@pytest.mark.parametrize("module", [fourstroke.types, fourstroke.config], ids=["types", "config"])
def test_each_name_is_there(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        assert getattr(module, name) is not None


def test_errors_and_their_exit_codes() -> None:
    tree = {
        name: kind.exit_code
        for name, kind in vars(fourstroke.errors).items()
        if isinstance(kind, type) and issubclass(kind, fourstroke.errors.FourstrokeError)
    }

    assert tree == ERRORS


def test_each_error_is_also_a_standard_type() -> None:
    for name in ERRORS.keys() - {"FourstrokeError"}:
        kind = getattr(fourstroke.errors, name)
        assert any(
            base.__module__ == "builtins" and base not in (Exception, BaseException, object) for base in kind.__mro__
        ), name


def _commands(group: typer.core.TyperGroup, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            found |= _commands(command, f"{prefix}{name} ")
        else:
            ordered = sorted(command.params, key=lambda parameter: parameter.param_type_name != "argument")
            found[prefix + name] = " ".join(
                (parameter.name or "") if parameter.param_type_name == "argument" else parameter.opts[0]
                for parameter in ordered
            )
    return found


def test_commands_and_their_flags() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)

    assert _commands(group) == COMMANDS


def test_the_version_is_the_packages() -> None:
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    match = re.search(r'^version = "(.*)"$', pyproject, re.MULTILINE)
    assert match is not None

    done = subprocess.run(
        [sys.executable, "-m", "fourstroke.cli", "version"], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == match.group(1)
