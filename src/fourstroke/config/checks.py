"""Cross-checks: combinations of valid values that make no run. Each is one sentence with the mend."""

from __future__ import annotations

from collections.abc import Iterator

from fourstroke.config.schema import RunConfig


def cross_checks(config: RunConfig) -> Iterator[str]:
    """One sentence for each combination that cannot run."""
    yield from _order_checks(config)
    rollout, engine, trainer, algorithm = config.rollout, config.engine, config.trainer, config.algorithm
    if rollout.max_tokens >= engine.max_model_len:
        yield (
            f"rollout.max_tokens = {rollout.max_tokens} leaves no room for a prompt in engine.max_model_len = "
            f"{engine.max_model_len}; raise the latter or lower the former"
        )
    if trainer.microbatch_tokens < engine.max_model_len:
        yield (
            f"trainer.microbatch_tokens = {trainer.microbatch_tokens} cannot hold one row of engine.max_model_len = "
            f"{engine.max_model_len} tokens; raise it to at least that"
        )
    if rollout.group_size < 2:
        yield (
            f"rollout.group_size = {rollout.group_size} gives algorithm.advantage = {algorithm.advantage!r} no peers "
            "to compare with; set it to 2 or more"
        )
    if rollout.min_scored > rollout.group_size:
        yield (
            f"rollout.min_scored = {rollout.min_scored} can never be reached by rollout.group_size = "
            f"{rollout.group_size}; lower it"
        )
    if rollout.min_scored < 2:
        yield f"rollout.min_scored = {rollout.min_scored} leaves a member without a peer; set it to 2 or more"
    if algorithm.updates_per_step > rollout.groups_per_step:
        yield (
            f"algorithm.updates_per_step = {algorithm.updates_per_step} exceeds rollout.groups_per_step = "
            f"{rollout.groups_per_step}, and a group is never divided; lower it"
        )
    too_large = [k for k in config.evaluation.pass_at if k > config.evaluation.samples_per_task]
    if too_large:
        yield (
            f"evaluation.pass_at holds k = {too_large[0]}, more than evaluation.samples_per_task = "
            f"{config.evaluation.samples_per_task}; pass@k needs k <= n, so raise n or drop that k"
        )
    if any(k < 1 for k in config.evaluation.pass_at):
        yield f"evaluation.pass_at = {list(config.evaluation.pass_at)} holds a k below 1; drop it"
    if "mlflow" in config.sinks.use and not config.sinks.mlflow_uri:
        yield (
            "sinks.use names 'mlflow', and sinks.mlflow_uri is null; set it to a tracking server "
            "(http://127.0.0.1:5000) or a database (sqlite:///mlflow.db)"
        )


def _order_checks(config: RunConfig) -> Iterator[str]:
    """Staleness, window and deterministic mode."""
    rollout, engine = config.rollout, config.engine
    most_window = rollout.staleness * rollout.groups_per_step + 1
    if rollout.window > most_window:
        yield (
            f"rollout.window = {rollout.window} leaves fewer slots than a step has groups; lower it to {most_window}, "
            "which is rollout.staleness * rollout.groups_per_step + 1, or raise rollout.staleness"
        )
    if config.deterministic and rollout.staleness > 0:
        yield (
            f"rollout.staleness = {rollout.staleness} cannot repeat bit for bit, since rollout and training then race; "
            "set it to 0 or deterministic to false"
        )
    if config.deterministic and engine.count > 1:
        yield (
            f"engine.count = {engine.count} cannot repeat bit for bit, since requests are spread by load; set it to 1 "
            "or deterministic to false"
        )
