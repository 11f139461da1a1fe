"""Can this machine hold this run? Asked once, before anything heavy starts.

:meth:`HostFacts.gather` looks at the machine and decides nothing; :func:`check_host` decides and looks at nothing, so
that every refusal is a row of a table in the tests. The sums here are lower bounds: a run that is refused could not
have worked, one that passes may still run out.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from fourstroke.config import RunConfig
from fourstroke.errors import ConfigError, PreflightError
from fourstroke.trainer.catalogue import ModelFacts

# Modules that a run imports and that the base dependencies do not bring.
_PARTS = ("torch", "transformers", "ray", "vllm")
# What the CPU builds of torch and vLLM are compiled for: the machine, and the flag in /proc/cpuinfo that each needs.
_PROCESSOR_FLAGS = {"x86_64": "avx2", "aarch64": "asimd"}
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
# fp32 master weights and gradients, and AdamW's two moments.
_TRAINER_BYTES_PER_PARAMETER = 4 + 4 + 8
# Three Python processes with torch loaded; measured 0.4 to 0.6 GiB each.
_PROCESS_BYTES = 2**30
# Ids, log-probabilities, versions and text of a sampled token in the run folder.
_STORED_BYTES_PER_TOKEN = 32
_LOG_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What start-up needs to know of the machine.

    Attributes:
        system: As ``platform.system()`` says it ("Linux").
        machine: As ``platform.machine()`` says it ("x86_64").
        python: Major and minor version of the interpreter.
        processor_flags: Instruction sets, as in ``/proc/cpuinfo``; empty where there is no such file.
        has_gpu: Whether an NVIDIA device is present.
        parts: Modules of ours to run with that are installed, of torch, transformers, ray and vllm.
        memory_bytes: Memory of the machine or, where that is less, of the container.
        free_disk_bytes: Free space where run folders go.
        free_shared_memory_bytes: Free space in the RAM-backed folder for weights in transit; 0 if there is none.
    """

    system: str
    machine: str
    python: tuple[int, int]
    processor_flags: frozenset[str]
    has_gpu: bool
    parts: frozenset[str]
    memory_bytes: int
    free_disk_bytes: int
    free_shared_memory_bytes: int

    @classmethod
    def gather(cls, *, runs_dir: Path, shared_memory_dir: Path) -> HostFacts:
        """Look at this machine; imports nothing heavy.

        Example:
            >>> HostFacts.gather(runs_dir=Path("runs"), shared_memory_dir=Path("/dev/shm")).memory_bytes > 0
            True
        """
        return cls(
            system=platform.system(),
            machine=platform.machine(),
            python=(sys.version_info.major, sys.version_info.minor),
            processor_flags=_processor_flags(Path("/proc/cpuinfo")),
            has_gpu=Path("/dev/nvidiactl").exists(),
            parts=frozenset(part for part in _PARTS if importlib.util.find_spec(part) is not None),
            memory_bytes=_memory_bytes(Path("/sys/fs/cgroup/memory.max")),
            free_disk_bytes=_free_bytes(_nearest_existing(runs_dir)),
            free_shared_memory_bytes=_free_bytes(shared_memory_dir),
        )


def check_host(config: RunConfig, *, facts: HostFacts, model: ModelFacts) -> None:
    """Return if the machine can hold the run.

    Raises:
        PreflightError: It cannot; one sentence, with the mend, for each thing that is in the way, a line each.
        ConfigError: ``engine.max_model_len`` is more than the model was made for.
    """
    problems = [*_platform_problems(facts), *_space_problems(config, facts=facts, model=model)]
    if problems:
        raise PreflightError("\n".join(problems))
    if config.engine.max_model_len > model.context_length:
        raise ConfigError(
            f"engine.max_model_len = {config.engine.max_model_len} is more than the {model.context_length} tokens that "
            f"model.name = {config.model.name!r} was made for; lower it to that"
        )


def _platform_problems(facts: HostFacts) -> Iterator[str]:
    if facts.system != "Linux":
        yield f"this is {facts.system}, and Fourstroke runs on Linux; use a Linux machine, container or WSL2"
        return
    if facts.python < (3, 11):
        yield f"this is Python {facts.python[0]}.{facts.python[1]}, and Fourstroke needs 3.11 or later; use that"
    flag = _PROCESSOR_FLAGS.get(facts.machine)
    if flag is None:
        yield (
            f"the processor is {facts.machine}, and torch and vLLM are built for {' and '.join(_PROCESSOR_FLAGS)}; "
            "use such a machine"
        )
    elif flag not in facts.processor_flags and not facts.has_gpu:
        yield (
            f"the processor ({facts.machine}) lacks {flag}, which vLLM's CPU build is compiled for; "
            f"use a processor with {flag}, or a GPU"
        )
    extra = "gpu" if facts.has_gpu else "cpu"
    for part in _PARTS:
        if part not in facts.parts:
            yield f"{part} is not installed; install fourstroke[{extra}], or run make setup"


def _space_problems(config: RunConfig, *, facts: HostFacts, model: ModelFacts) -> Iterator[str]:
    publication_bytes = model.num_parameters * _DTYPE_BYTES[config.engine.dtype]
    if facts.free_shared_memory_bytes < publication_bytes:
        yield (
            f"shared memory has {_gib(facts.free_shared_memory_bytes)} free, and one publication of weights takes "
            f"{_gib(publication_bytes)}; give it more (docker run --shm-size), or set FOURSTROKE_SHM to a folder in RAM"
        )
    rollout = config.rollout
    num_tokens = config.num_steps * rollout.groups_per_step * rollout.group_size * rollout.max_tokens
    run_bytes = publication_bytes + num_tokens * _STORED_BYTES_PER_TOKEN + _LOG_BYTES
    if facts.free_disk_bytes < run_bytes:
        yield (
            f"runs_dir = {config.runs_dir!r} has {_gib(facts.free_disk_bytes)} free on its disk, and the run with its "
            f"checkpoint takes {_gib(run_bytes)}; free some, or set runs_dir to another disk"
        )
    # On a GPU the model, its optimiser and the cache lie in the GPU's memory.
    memory_bytes = publication_bytes + _PROCESS_BYTES
    if not facts.has_gpu:
        memory_bytes += model.num_parameters * _TRAINER_BYTES_PER_PARAMETER + publication_bytes
        memory_bytes += int(config.engine.kv_cache_gib * 2**30)
    if facts.memory_bytes < memory_bytes:
        yield (
            f"the machine has {_gib(facts.memory_bytes)} of memory, and the run takes at least {_gib(memory_bytes)}; "
            "choose a smaller model or lower engine.kv_cache_gib"
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


# --- looking --------------------------------------------------------------------------------------------------------


def _processor_flags(cpuinfo: Path) -> frozenset[str]:
    """Flags of the first processor; x86 calls the line ``flags``, ARM ``Features``."""
    if not cpuinfo.is_file():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        key, _, values = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()


def _memory_bytes(cgroup_limit: Path) -> int:
    total = psutil.virtual_memory().total
    limit = cgroup_limit.read_text().strip() if cgroup_limit.is_file() else "max"
    return total if limit == "max" else min(total, int(limit))


def _nearest_existing(folder: Path) -> Path:
    resolved = folder.expanduser().absolute()
    return next(parent for parent in (resolved, *resolved.parents) if parent.exists())


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free if folder.is_dir() else 0
