"""Cross-checks: combinations of valid values that make no run. Each is one sentence with the mend."""

from __future__ import annotations

from collections.abc import Iterator

from fourstroke.config.bundles import BUNDLES, LOSS_KEYS
from fourstroke.config.schema import RunConfig


def cross_checks(config: RunConfig) -> Iterator[str]:
    """One sentence for each combination that cannot run."""
    yield from _order_checks(config)
    yield from _algorithm_checks(config)
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
    if rollout.min_scored > rollout.group_size:
        yield (
            f"rollout.min_scored = {rollout.min_scored} can never be reached by rollout.group_size = "
            f"{rollout.group_size}; lower it"
        )
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


def _algorithm_checks(config: RunConfig) -> Iterator[str]:
    """Terms of the objective that do not go together, or that nothing reads."""
    yield from _advantage_checks(config)
    algorithm = config.algorithm
    for key in LOSS_KEYS:
        value = getattr(algorithm, key)
        if key not in BUNDLES[algorithm.name].reads and value != type(algorithm).model_fields[key].default:
            readers = ", ".join(name for name, bundle in BUNDLES.items() if key in bundle.reads)
            yield f"algorithm.{key} = {value!r} is not read by {algorithm.name}, but by {readers}; remove it"
    is_around_behaviour = algorithm.name in ("dppo", "dro")
    if is_around_behaviour and algorithm.correction != "none":
        yield (
            f"algorithm.correction = {algorithm.correction!r} would count twice in {algorithm.name}, which already "
            "measures from the policy that sampled; set it to 'none'"
        )
    if algorithm.clip_low == 1 and algorithm.name == "gmpo":
        yield "algorithm.clip_low = 1 has no logarithm of 1 - clip_low, which gmpo clips at; lower it"
    if algorithm.rejection == "none" and (algorithm.rejection_low > 0 or algorithm.rejection_high is not None):
        yield "algorithm.rejection_low and rejection_high are not read while algorithm.rejection = 'none'; set that too"
    if algorithm.rejection != "none" and algorithm.rejection_low == 0 and algorithm.rejection_high is None:
        yield (
            f"algorithm.rejection = {algorithm.rejection!r} rejects nothing without rejection_low or rejection_high; "
            "set one of them"
        )
    if algorithm.mask_truncated and algorithm.overlong_share > 0:
        yield (
            "algorithm.mask_truncated = True trains on no reply that algorithm.overlong_share punishes most; "
            "choose one of them"
        )


def _advantage_checks(config: RunConfig) -> Iterator[str]:
    """Sizes of groups that the advantage can work with."""
    rollout, algorithm = config.rollout, config.algorithm
    needs_peers = algorithm.advantage != "batch_standardised"
    if needs_peers and rollout.group_size < 2:
        yield (
            f"rollout.group_size = {rollout.group_size} gives algorithm.advantage = {algorithm.advantage!r} no peers "
            "to compare with; set it to 2 or more"
        )
    if needs_peers and rollout.min_scored < 2:
        yield f"rollout.min_scored = {rollout.min_scored} leaves a member without a peer; set it to 2 or more"
    if algorithm.advantage == "decoupled" and algorithm.overlong_share > 0:
        yield (
            "algorithm.overlong_share changes the score, which algorithm.advantage = 'decoupled' does not read but its "
            "components; set it to 0 and let the grader give the length as a component"
        )
    if algorithm.advantage == "pass_at_k" and algorithm.pass_k >= rollout.group_size:
        yield (
            f"algorithm.pass_k = {algorithm.pass_k} leaves no other subset of rollout.group_size = "
            f"{rollout.group_size} members; lower it or raise the group's size"
        )
