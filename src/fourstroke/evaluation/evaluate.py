"""Evaluate the present weights on a set of tasks, with the same runner and grader as training.

The draws have epoch -1: they are no draws of the ledger. Their seeds depend on the run's seed and the task alone, so
two evaluations of one run sample each task with the same seeds.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from fourstroke.config import RunConfig
from fourstroke.errors import DataError, DoesNotFitError
from fourstroke.evaluation.statistics import clustered_estimate, pass_at_k, pass_hat_k
from fourstroke.types import (
    Assignment,
    Draw,
    Estimate,
    GroupRecord,
    RefusedGroup,
    StopReason,
    Tamper,
    Task,
    Unscored,
)

EVALUATION_EPOCH = -1


class Rollouts(Protocol):
    """What an evaluation asks of the rollout room."""

    async def run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        """Sample, grade and store groups; together: as one batch that repeats bit for bit."""
        ...


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an evaluation found. Episodes without a score are in no mean; they are counted.

    Attributes:
        name: Which evaluation ("before", "after").
        version: Number of the weights that were evaluated.
        estimate: Mean score with its interval, over the tasks that have a scored episode.
        pass_at: Mean pass@k by k, over the tasks with at least k scored episodes; a k that no task allows is absent.
            An episode is correct if its score is 1 or more.
        pass_hat: The same of pass^k, that all of k episodes are correct.
        num_tasks_without_score: Tasks that are in no mean, since none of their episodes was scored.
        num_unscored: Episodes whose grader, environment or engine failed; ``num_failed`` are among them.
        num_tampered: Episodes that tried to change their own grading.
        num_failed: Episodes that failed before grading.
        num_truncated: Episodes that were cut by length; they are graded as they stand.
        mean_tokens: Mean of sampled tokens over the episodes that did not fail.
        seconds: Duration on the event loop's clock.
        scores: Scores of each task's scored episodes, by the task's id: what a paired comparison needs.

    Example:
        >>> report.estimate.mean  # doctest: +SKIP
        0.71
    """

    name: str
    version: int
    estimate: Estimate
    pass_at: dict[int, float]
    num_tasks_without_score: int
    num_unscored: int
    num_tampered: int
    num_failed: int
    num_truncated: int
    mean_tokens: float
    seconds: float
    scores: dict[str, list[float]]
    pass_hat: dict[int, float] = {}


def counted_apart(report: EvaluationReport) -> dict[str, int]:
    """Episodes that are no plain score, each kind apart: none is counted twice but those cut by length.

    Example:
        >>> counted_apart(report)  # doctest: +SKIP
        {'failed': 2, 'not scored': 1, 'tampered': 1, 'cut by length': 1}
    """
    return {
        "failed": report.num_failed,
        "not scored": report.num_unscored - report.num_failed,
        "tampered": report.num_tampered,
        "cut by length": report.num_truncated,
    }


async def evaluate(
    tasks: Sequence[Task],
    *,
    name: str,
    rollouts: Rollouts,
    config: RunConfig,
    version: int,
    on_task: Callable[[int, int], None] = lambda _done, _total: None,
) -> EvaluationReport:
    """Run the first ``config.evaluation.num_tasks`` tasks (all, if null) at once, and report.

    Args:
        tasks: Distinct tasks, held out from training.
        name: Name of the evaluation, for the report.
        rollouts: Samples and grades.
        config: Gives the seed, the number of samples and the values of k.
        version: Number of the weights that the engine holds.
        on_task: Called with (tasks done, tasks in all) after each task.

    Raises:
        DataError: Fewer than two tasks have a score, so that there is no interval.
        DoesNotFitError: A task's prompt and a full reply exceed the context.
        FourstrokeError: Whatever the rollouts raised first; the other tasks are cancelled before it passes on.

    Example:
        >>> report = await evaluate(taskset.held_out, name="before", rollouts=rollouts, config=config,
        ...                         version=0)  # doctest: +SKIP
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    chosen = tasks[: config.evaluation.num_tasks]
    num_done = 0
    assignments = [_assignment(index, task, config=config, version=version) for index, task in enumerate(chosen)]
    # Deterministic batches are as large as the engine's, so that tasks are counted off while it goes on.
    size = max(1, config.engine.max_num_seqs // config.evaluation.samples_per_task) if config.deterministic else 1
    batches = [assignments[start : start + size] for start in range(0, len(assignments), size)]

    async def one(batch: Sequence[Assignment]) -> list[GroupRecord]:
        nonlocal num_done
        groups = [_group(outcome) for outcome in await rollouts.run(batch, is_together=config.deterministic)]
        num_done += len(batch)
        on_task(num_done, len(chosen))
        return groups

    if config.deterministic:
        groups = [group for batch in batches for group in await one(batch)]
    else:
        groups = [group for done in await _gather([one(batch) for batch in batches]) for group in done]
    return _report(groups, name=name, config=config, version=version, seconds=loop.time() - started)


async def _gather(work: Sequence[Coroutine[Any, Any, list[GroupRecord]]]) -> list[list[GroupRecord]]:
    """All results in order; the first error ends the others."""
    running = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*running)
    finally:
        for future in running:
            future.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _assignment(index: int, task: Task, *, config: RunConfig, version: int) -> Assignment:
    draw = Draw(epoch=EVALUATION_EPOCH, index=index, task_id=task.id, seed=_seed(config.seed, task))
    return Assignment(
        draw=draw,
        task=task,
        num_samples=config.evaluation.samples_per_task,
        admitted_version=version,
        incarnation=version,
        attempt=0,
    )


def _group(outcome: GroupRecord | RefusedGroup) -> GroupRecord:
    if isinstance(outcome, RefusedGroup):
        raise DoesNotFitError(outcome.detail) if outcome.reason == "does_not_fit" else DataError(outcome.detail)
    return outcome


def _seed(run_seed: int, task: Task) -> int:
    """A seed below 2^31, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"evaluation/{run_seed}/{task.id}".encode()).digest()[:4], "big") >> 1


def _report(
    groups: Sequence[GroupRecord], *, name: str, config: RunConfig, version: int, seconds: float
) -> EvaluationReport:
    scored = [group.scores_G for group in groups if group.scored]
    members = [episode for group in groups for episode in group.episodes]
    sampled = [episode for episode in members if episode.stop is not StopReason.FAILED]
    if len(scored) < 2:
        raise DataError(
            f"evaluation {name!r}: {len(scored)} of {len(groups)} tasks have a scored episode, and an interval needs "
            f"two; {_first_failure(groups)}"
        )
    return EvaluationReport(
        name=name,
        version=version,
        estimate=clustered_estimate(scored),
        pass_at=_mean_by_k(pass_at_k, scored, config.evaluation.pass_at),
        pass_hat=_mean_by_k(pass_hat_k, scored, config.evaluation.pass_at),
        num_tasks_without_score=len(groups) - len(scored),
        num_unscored=sum(isinstance(member.verdict, Unscored) for member in members),
        num_tampered=sum(isinstance(member.verdict, Tamper) for member in members),
        num_failed=len(members) - len(sampled),
        num_truncated=sum(episode.stop is StopReason.LENGTH for episode in sampled),
        mean_tokens=sum(episode.num_sampled_tokens for episode in sampled) / len(sampled),
        seconds=seconds,
        scores={group.draw.task_id: group.scores_G.tolist() for group in groups},
    )


def _mean_by_k(
    estimator: Callable[[int, int, int], float], scores_by_task: Sequence[np.ndarray], ks: Sequence[int]
) -> dict[int, float]:
    counts = [(len(scores_G), int((scores_G >= 1.0).sum())) for scores_G in scores_by_task]
    by_k = {k: [estimator(n, correct, k) for n, correct in counts if n >= k] for k in ks}
    return {k: sum(values) / len(values) for k, values in by_k.items() if values}


def _first_failure(groups: Sequence[GroupRecord]) -> str:
    verdicts = [member.verdict for group in groups for member in group.episodes]
    first = next((verdict for verdict in verdicts if isinstance(verdict, Unscored)), None)
    return f"first failure: {first.reason}: {first.detail}" if first else "no episode failed; give it more tasks"
