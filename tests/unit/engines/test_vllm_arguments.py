"""What vLLM is told, as data: every leaf of the configuration is read, and a prompt is never split."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fourstroke.config import EngineConfig
from fourstroke.engines.vllm import _set_for_children, child_environment, engine_arguments

# A value of each leaf that is not its default, the place where vLLM reads it, and on what machine.
LEAVES: dict[str, tuple[Any, str, Any, bool]] = {
    "dtype": ("float32", "dtype", "float32", False),
    "max_model_len": (2048, "max_model_len", 2048, False),
    "max_num_seqs": (7, "max_num_seqs", 7, False),
    "kv_cache_gib": (0.5, "kv_cache_memory_bytes", 2**29, False),
    "gpu_memory_fraction": (0.25, "gpu_memory_utilization", 0.25, True),
    "num_threads": (3, "additional_config", 3, False),
    "is_eager": (False, "enforce_eager", False, False),
}


def arguments(config: EngineConfig, *, on_gpu: bool = False) -> dict[str, Any]:
    return engine_arguments(config, Path("model"), seed=0, scratch=Path("scratch"), on_gpu=on_gpu)


def test_the_table_holds_every_leaf() -> None:
    """But for two that are not vLLM's: how many engines there are, and what a pause does (the engines' contract)."""
    assert LEAVES.keys() | {"count", "landing"} == EngineConfig.model_fields.keys()


@pytest.mark.parametrize("leaf", LEAVES)
def test_each_leaf_is_read(leaf: str) -> None:
    value, key, expected, on_gpu = LEAVES[leaf]
    told = arguments(EngineConfig.model_validate({leaf: value}), on_gpu=on_gpu)[key]

    assert (told["num_threads"] if key == "additional_config" else told) == expected
    assert (
        arguments(EngineConfig(), on_gpu=on_gpu)[key]
        != arguments(EngineConfig.model_validate({leaf: value}), on_gpu=on_gpu)[key]
    )


def test_the_cache_is_sized_by_one_rule_on_each_machine() -> None:
    on_cpu, on_gpu = (arguments(EngineConfig(), on_gpu=flag) for flag in (False, True))

    assert "gpu_memory_utilization" not in on_cpu
    assert "kv_cache_memory_bytes" not in on_gpu


@pytest.mark.parametrize(("max_model_len", "max_num_seqs"), [(256, 64), (100_000, 64), (256, 20_000)])
def test_no_prompt_is_ever_split(max_model_len: int, max_num_seqs: int) -> None:
    told = arguments(EngineConfig(max_model_len=max_model_len, max_num_seqs=max_num_seqs))

    assert told["enable_chunked_prefill"] is False
    assert told["max_num_batched_tokens"] >= max(max_model_len, max_num_seqs)


def test_the_sampled_distribution_is_the_reported_one_and_nothing_is_unpickled() -> None:
    told = arguments(EngineConfig())

    assert told["logprobs_mode"] == "processed_logprobs"
    assert told["load_format"] == "safetensors"
    # The model's own generation settings (top_p and the like) are not taken over.
    assert told["generation_config"] == "vllm"


def test_threads_of_the_openmp_library_sleep_either_way() -> None:
    intel = child_environment(scratch=Path("s"), openmp=Path("/lib/libiomp5.so"), log_path=Path("log"))
    gnu = child_environment(scratch=Path("s"), openmp=None, log_path=Path("log"))

    assert (intel["LD_PRELOAD"], intel["KMP_BLOCKTIME"]) == ("/lib/libiomp5.so", "1")
    assert "LD_PRELOAD" not in gnu
    assert gnu["OMP_WAIT_POLICY"] == "PASSIVE"
    assert intel["VLLM_NO_USAGE_STATS"] == gnu["VLLM_NO_USAGE_STATS"] == "1"


def test_variables_are_set_for_a_while_and_the_users_own_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURSTROKE_TEST_USERS", "theirs")
    monkeypatch.delenv("FOURSTROKE_TEST_OURS", raising=False)

    with _set_for_children({"FOURSTROKE_TEST_USERS": "ours", "FOURSTROKE_TEST_OURS": "ours"}):
        assert (os.environ["FOURSTROKE_TEST_USERS"], os.environ["FOURSTROKE_TEST_OURS"]) == ("theirs", "ours")

    assert os.environ["FOURSTROKE_TEST_USERS"] == "theirs"
    assert "FOURSTROKE_TEST_OURS" not in os.environ


def test_importing_the_room_loads_no_engine() -> None:
    code = "import sys, fourstroke.engines.vllm; print([m for m in ('vllm', 'torch', 'ray') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_with_path())

    assert answer.stdout.strip() == "[]"


def _with_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
