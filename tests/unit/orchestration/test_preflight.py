"""Start-up checks: each thing that a machine can lack is one row, with the sentence that names it and its mend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourstroke.config import RunConfig, load_config
from fourstroke.errors import ConfigError, FourstrokeError, PreflightError
from fourstroke.orchestration.preflight import HostFacts, _memory_bytes, _processor_flags, check_host
from fourstroke.trainer.catalogue import ModelFacts

GIB = 2**30
GOOD = HostFacts(
    system="Linux",
    machine="x86_64",
    python=(3, 11),
    processor_flags=frozenset({"sse4_2", "avx2"}),
    has_gpu=False,
    parts=frozenset({"torch", "transformers", "ray", "vllm"}),
    memory_bytes=24 * GIB,
    free_disk_bytes=100 * GIB,
    free_shared_memory_bytes=8 * GIB,
)
# A hundred million parameters: 200e6 bytes to publish in bf16.
MODEL = ModelFacts(
    vocab_size=49152, context_length=2048, num_parameters=100_000_000, dtype="bfloat16", size_bytes=200_000_000
)
CONFIG = load_config(
    {
        "num_steps": 10,
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_tokens": 100},
        "engine": {"kv_cache_gib": 1},
    }
)


@pytest.mark.parametrize(
    "facts",
    [
        GOOD,
        replace(GOOD, machine="aarch64", processor_flags=frozenset({"asimd"})),
        replace(GOOD, python=(3, 13)),
        # vLLM's CUDA build asks nothing of the processor.
        replace(GOOD, processor_flags=frozenset(), has_gpu=True),
        replace(GOOD, free_shared_memory_bytes=200_000_000),
        # Checkpoint, 10 * 2 * 4 * 100 tokens of 32 bytes, and 64 MiB of logs.
        replace(GOOD, free_disk_bytes=200_000_000 + 8_000 * 32 + 2**26),
        # Two copies in bf16, 16 bytes a parameter for training, 1 GiB of cache, 1 GiB for processes.
        replace(GOOD, memory_bytes=2 * 200_000_000 + 1_600_000_000 + 2 * GIB),
        # On a GPU the host holds the publication alone.
        replace(GOOD, memory_bytes=200_000_000 + GIB, has_gpu=True),
    ],
)
def test_a_machine_that_can_hold_the_run_passes(facts: HostFacts) -> None:
    check_host(CONFIG, facts=facts, model=MODEL)


@pytest.mark.parametrize(
    ("changes", "named", "mend"),
    [
        ({"system": "Darwin"}, "this is Darwin", "use a Linux machine"),
        ({"python": (3, 10)}, "Python 3.10", "3.11 or later"),
        ({"machine": "riscv64"}, "riscv64", "x86_64 and aarch64"),
        ({"processor_flags": frozenset({"avx"})}, "lacks avx2", "use a processor with avx2, or a GPU"),
        ({"machine": "aarch64"}, "lacks asimd", "use a processor with asimd"),
        ({"parts": frozenset({"transformers", "ray", "vllm"})}, "torch is not installed", "fourstroke[cpu]"),
        ({"parts": frozenset({"torch", "transformers", "ray"})}, "vllm is not installed", "fourstroke[cpu]"),
        (
            {"parts": frozenset({"torch", "transformers", "ray"}), "has_gpu": True},
            "vllm is not installed",
            "fourstroke[gpu]",
        ),
        ({"free_shared_memory_bytes": 199_999_999}, "one publication of weights takes 0.19 GiB", "--shm-size"),
        ({"free_shared_memory_bytes": 0}, "shared memory has 0.00 GiB free", "FOURSTROKE_SHM"),
        (
            {"free_disk_bytes": 200_000_000 + 8_000 * 32 + 2**26 - 1},
            "runs_dir = 'runs'",
            "set runs_dir to another disk",
        ),
        ({"memory_bytes": 2 * 200_000_000 + 1_600_000_000 + 2 * GIB - 1}, "of memory", "lower engine.kv_cache_gib"),
    ],
)
def test_what_the_machine_lacks_is_named_in_one_sentence(changes: dict[str, Any], named: str, mend: str) -> None:
    with pytest.raises(PreflightError) as caught:
        check_host(CONFIG, facts=replace(GOOD, **changes), model=MODEL)

    sentence = str(caught.value)
    assert named in sentence
    assert mend in sentence
    assert "\n" not in sentence


def test_everything_that_is_in_the_way_is_named_at_once() -> None:
    facts = replace(GOOD, free_disk_bytes=0, free_shared_memory_bytes=0, memory_bytes=0)

    with pytest.raises(PreflightError) as caught:
        check_host(CONFIG, facts=facts, model=MODEL)

    assert len(str(caught.value).splitlines()) == 3


def test_a_publication_in_fp32_takes_twice_the_shared_memory() -> None:
    config = load_config(CONFIG, overrides=["engine.dtype=float32"])
    facts = replace(GOOD, free_shared_memory_bytes=399_999_999)

    with pytest.raises(PreflightError, match=r"takes 0\.37 GiB"):
        check_host(config, facts=facts, model=MODEL)


def test_a_context_longer_than_the_model_was_made_for_is_refused() -> None:
    config = load_config({"engine": {"max_model_len": 2049}, "model": {"name": "small"}})

    with pytest.raises(ConfigError, match=r"engine\.max_model_len = 2049 is more than the 2048 .* 'small' .* lower it"):
        check_host(config, facts=GOOD, model=MODEL)
    check_host(load_config(config, overrides=["engine.max_model_len=2048"]), facts=GOOD, model=MODEL)


def test_the_refusals_are_of_the_tree_and_have_exit_codes() -> None:
    assert issubclass(PreflightError, FourstrokeError)
    assert (ConfigError.exit_code, PreflightError.exit_code) == (2, 3)


# --- looking --------------------------------------------------------------------------------------------------------


def test_facts_of_this_machine_are_plausible(tmp_path: Path) -> None:
    facts = HostFacts.gather(runs_dir=tmp_path / "not" / "made" / "yet", shared_memory_dir=tmp_path / "none")

    assert facts.memory_bytes > 2**28
    assert facts.free_disk_bytes > 0
    assert facts.free_shared_memory_bytes == 0
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n", {"fpu", "avx2"}),
        ("processor\t: 0\nFeatures\t: fp asimd\n", {"fp", "asimd"}),
        ("processor\t: 0\n", set()),
    ],
)
def test_flags_are_read_as_both_architectures_write_them(tmp_path: Path, text: str, flags: set[str]) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)

    assert _processor_flags(file) == flags


def test_a_containers_limit_counts_where_it_is_less(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    machine = _memory_bytes(limit)

    limit.write_text("1048576\n")
    assert _memory_bytes(limit) == 1048576
    limit.write_text("max\n")
    assert _memory_bytes(limit) == machine
    limit.write_text(f"{machine * 2}\n")
    assert _memory_bytes(limit) == machine


def test_the_default_configuration_names_a_model_that_fits() -> None:
    assert RunConfig().engine.max_model_len <= MODEL.context_length
