"""A 135-million-parameter model learns sums and differences on two CPU cores, in about ten minutes."""

from __future__ import annotations

from fourstroke.config import RunConfig


def quickstart() -> RunConfig:
    """GRPO on "What is a + b?" and "What is a - b?": half of the problems are held out by a hash of their text.

    Example:
        >>> quickstart().name
        'quickstart'
    """
    return RunConfig.model_validate(
        {
            "name": "quickstart",
            "num_steps": 40,
            "model": {"name": "smollm2-135m-instruct"},
            "tasks": {
                "use": "fourstroke.environments.arithmetic:arithmetic",
                # In place of the template's own system message, which is longer than problem and reply together.
                "arguments": {"system": "You are a calculator. Work out each sum or difference, and answer briefly."},
            },
            "grader": {"use": "fourstroke.rewards.verifiers:numeric", "arguments": {}},
            "rollout": {"groups_per_step": 16, "group_size": 8, "max_tokens": 24, "temperature": 1.0},
            "algorithm": {"name": "grpo"},
            "trainer": {"learning_rate": 2e-5, "microbatch_tokens": 1024},
            "engine": {"max_model_len": 128, "max_num_seqs": 128, "kv_cache_gib": 0.25},
            "evaluation": {"samples_per_task": 4, "pass_at": (1, 4)},
        }
    )
