"""What the controller measures: from nouns to additions in the metric book. No I/O; every mean keeps its count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fourstroke.algorithms import LossMetric, is_uniform
from fourstroke.config import RunConfig
from fourstroke.observability import Event, EventKind, MetricBook
from fourstroke.store import Audit
from fourstroke.types import GroupRecord, Microbatch, Publication, StepStats, StopReason, Tamper, Unscored

# Largest mean |log ratio| in nats a token that two right implementations of one model show (bfloat16 was measured at
# 0.05, float32 at 1e-5), with room for long replies.
_MISMATCH_LIMIT = {"float32": 1e-3, "bfloat16": 0.25}


class Span:
    """Seconds during which at least one of several overlapping activities went on."""

    def __init__(self) -> None:
        self._num_active = 0
        self._since_s = 0.0
        self._total_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far, up to the end of the last activity."""
        return self._total_s

    @contextmanager
    def entered(self, now: Callable[[], float]) -> Iterator[None]:
        """One activity; ``now`` reads the loop's clock."""
        if self._num_active == 0:
            self._since_s = now()
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._total_s += now() - self._since_s


def mismatch_limit(config: RunConfig) -> float:
    """The limit on mean |log ratio| that stops a run: ``trainer.max_mismatch``, or by the coarser of the two dtypes.

    With staleness the ratio holds what the policy has learned meanwhile, so that there is no limit but the user's.
    """
    if config.trainer.max_mismatch is None and config.rollout.staleness > 0:
        return math.inf
    return dtype_mismatch_limit(config)


def dtype_mismatch_limit(config: RunConfig) -> float:
    """The same limit where trainer and engine hold equal weights."""
    if config.trainer.max_mismatch is not None:
        return config.trainer.max_mismatch
    return max(_MISMATCH_LIMIT[config.engine.dtype], _MISMATCH_LIMIT[config.trainer.compute_dtype])


def mean_abs_log_ratio(passes: Sequence[StepStats]) -> float:
    """Mean |current - behaviour| over the loss tokens that went through the model; 0 if there were none."""
    num_tokens = sum(stats.num_tokens for stats in passes)
    total = sum(stats.sums[LossMetric.ABS_LOG_RATIO] for stats in passes if stats.num_tokens)
    return total / num_tokens if num_tokens else 0.0


def add_rollout(book: MetricBook, group: GroupRecord) -> None:
    """Tokens sampled for a group, whether it is trained on or not."""
    book.add("rollout/generate/tokens", float(group.num_sampled_tokens))


def add_throughput(book: MetricBook, *, num_tokens: int, seconds: float) -> None:
    """Tokens a second, over the seconds in which requests were at the engine."""
    if seconds > 0:
        book.add("rollout/generate/tokens_per_second", float(num_tokens), seconds)


def add_groups(book: MetricBook, groups: Sequence[GroupRecord], *, trained_at: int) -> None:
    """What the step trains on: lengths, ends, verdicts, mixed groups and lags."""
    for group in groups:
        for episode in group.episodes:
            is_answered = episode.stop in (StopReason.FINISHED, StopReason.LENGTH)
            book.add("rollout/episode/failed_fraction", float(not is_answered), 1)
            if is_answered:
                book.add("rollout/episode/length_mean", float(episode.num_sampled_tokens), 1)
                book.add("rollout/episode/truncated_fraction", float(episode.stop is StopReason.LENGTH), 1)
            book.add("reward/grade/unscored_fraction", float(isinstance(episode.verdict, Unscored)), 1)
            book.add("reward/grade/tamper_fraction", float(isinstance(episode.verdict, Tamper)), 1)
            for run in episode.versions:
                book.add(
                    "train/staleness/token_lag_mean", float((trained_at - run.version) * run.num_tokens), run.num_tokens
                )
        book.add("reward/grade/score_mean", float(group.scores_G.sum()), len(group.scores_G))
        book.add("reward/group/mixed_fraction", float(not is_uniform(group.scores_G)), 1)
        lag = trained_at - group.admitted_version
        book.add("train/staleness/lag_mean", float(lag), 1)
        book.add("train/staleness/lag_max", float(lag))


def add_passes(
    book: MetricBook, *, num_rows: int, microbatches: Sequence[Microbatch], passes: Sequence[StepStats]
) -> None:
    """One update's forward and backward passes; ``num_rows`` are those of its batch, seen by the model or not."""
    num_seen = sum(len(microbatch.rows) for microbatch in microbatches)
    passes = [stats for stats in passes if stats.num_tokens]  # one without a token summed up nothing
    book.add("train/rows/skipped_fraction", float(num_rows - num_seen), num_rows)
    book.add("train/loss/loss", sum(stats.sums[LossMetric.LOSS] for stats in passes), 1)
    for name, metric in _PER_TOKEN.items():
        for stats in passes:
            book.add(name, stats.sums[metric], stats.num_tokens)


_PER_TOKEN = {
    "train/loss/entropy": LossMetric.ENTROPY,
    "train/loss/clipped_fraction": LossMetric.CLIPPED,
    "train/correction/weight_mean": LossMetric.IMPORTANCE_WEIGHT,
    "train/correction/truncated_fraction": LossMetric.TRUNCATED,
    "train/mismatch/mean_abs_log_ratio": LossMetric.ABS_LOG_RATIO,
    "train/mismatch/mean_log_ratio": LossMetric.LOG_RATIO,
}


def add_update(book: MetricBook, stats: StepStats) -> None:
    """What the optimiser did."""
    book.add("train/optim/grad_norm", stats.sums["grad_norm"], 1)
    book.add("train/optim/learning_rate", stats.sums["learning_rate"])


def add_publication(book: MetricBook, publication: Publication) -> None:
    """How many of the published weights have changed."""
    num_elements = sum(entry.num_elements for entry in publication.tensors)
    num_changed = sum(entry.num_changed for entry in publication.tensors)
    book.add("weights/publication/changed_fraction", float(num_changed), num_elements)


def add_ledger(book: MetricBook, audit: Audit, *, num_to_come: int) -> None:
    """The ledger's balance after the step.

    Args:
        book: Of the step.
        audit: The balance.
        num_to_come: Pending draws that an earlier incarnation admitted and this one has not taken up yet: in the
            history that led here they are still to be drawn.
    """
    book.add("ledger/draws/drawn", float(audit.drawn - num_to_come))
    book.add("ledger/draws/trained", float(audit.trained))
    book.add("ledger/draws/dropped", float(audit.dropped))
    book.add("ledger/draws/pending", float(audit.pending - num_to_come))


def outcome_events(group: GroupRecord, *, time_s: float) -> Iterator[Event]:
    """Events of the members that have no score."""
    for episode in group.episodes:
        name, verdict = f"{group.id}.{episode.member}", episode.verdict
        if episode.stop is StopReason.FAILED:
            fields: dict[str, str | int | float] = {"episode": name, "detail": episode.failure}
            yield Event(kind=EventKind.EPISODE_FAILED, time_s=time_s, fields=fields)
        elif isinstance(verdict, Unscored):
            fields = {"episode": name, "reason": verdict.reason, "detail": verdict.detail}
            yield Event(kind=EventKind.EPISODE_UNSCORED, time_s=time_s, fields=fields)
