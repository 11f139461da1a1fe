"""A 135-million-parameter model learns sums and differences on two CPU cores, in about seven minutes."""

from __future__ import annotations

from fourstroke.config import RunConfig


def quickstart() -> RunConfig:
    """GRPO on "What is a + b?" and "What is a - b?": a quarter of the problems is held out by a hash of their text.

    Example:
        >>> quickstart().name
        'quickstart'
    """
    return RunConfig.model_validate(
        {
            "name": "quickstart",
            "num_steps": 64,
            "model": {"name": "smollm2-135m-instruct"},
            "tasks": {
                "use": "fourstroke.environments.arithmetic:arithmetic",
                "arguments": {
                    # Makes a prompt longer than a block of the engine's cache, so that a group computes it once.
                    "system": "You are a calculator. Work out each sum or difference, and answer briefly.",
                    "held_out_fraction": 0.25,
                },
            },
            "grader": {"use": "fourstroke.rewards.verifiers:numeric", "arguments": {}},
            "rollout": {"groups_per_step": 16, "group_size": 8, "max_tokens": 24, "temperature": 1.0},
            "algorithm": {"name": "grpo"},
            "trainer": {"learning_rate": 3e-5, "schedule": "linear", "microbatch_tokens": 1024},
            "engine": {"max_model_len": 128, "max_num_seqs": 128, "kv_cache_gib": 0.25},
            "evaluation": {"samples_per_task": 4, "pass_at": (1, 4)},
        }
    )
