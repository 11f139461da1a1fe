"""What the controller measures: from nouns to additions in the metric book. No I/O; every mean keeps its count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fourstroke.algorithms import LossMetric, is_uniform
from fourstroke.config import RunConfig
from fourstroke.observability import Event, EventKind, MetricBook
from fourstroke.store import Audit
from fourstroke.types import Batch, Group, Microbatch, StepStats, StopReason, Tamper, Unscored

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
    """The limit on mean |log ratio| that stops a run: ``trainer.max_mismatch``, or by the coarser of the two dtypes."""
    if config.trainer.max_mismatch is not None:
        return config.trainer.max_mismatch
    return max(_MISMATCH_LIMIT[config.engine.dtype], _MISMATCH_LIMIT[config.trainer.compute_dtype])


def mean_abs_log_ratio(passes: Sequence[StepStats]) -> float:
    """Mean |current - behaviour| over the loss tokens that went through the model; 0 if there were none."""
    num_tokens = sum(stats.num_tokens for stats in passes)
    return sum(stats.sums[LossMetric.ABS_LOG_RATIO] for stats in passes) / num_tokens if num_tokens else 0.0


def add_rollout(book: MetricBook, group: Group) -> None:
    """Tokens sampled for a group, whether it is trained on or not."""
    book.add("rollout/generate/tokens", float(sum(m.episode.num_sampled_tokens for m in group.members)))


def add_throughput(book: MetricBook, *, seconds: float) -> None:
    """Tokens a second, over the seconds in which requests were at the engine."""
    tokens = book.record().get("rollout/generate/tokens", 0.0)
    if seconds > 0:
        book.add("rollout/generate/tokens_per_second", tokens, seconds)


def add_groups(book: MetricBook, groups: Sequence[Group], *, trained_at: int) -> None:
    """What the step trains on: lengths, ends, verdicts, mixed groups and lags."""
    for group in groups:
        for member in group.members:
            episode, verdict = member.episode, member.verdict
            is_answered = episode.stop in (StopReason.FINISHED, StopReason.LENGTH)
            book.add("rollout/episode/failed_fraction", float(not is_answered), 1)
            if is_answered:
                book.add("rollout/episode/length_mean", float(episode.num_sampled_tokens), 1)
                book.add("rollout/episode/truncated_fraction", float(episode.stop is StopReason.LENGTH), 1)
            book.add("reward/grade/unscored_fraction", float(isinstance(verdict, Unscored)), 1)
            book.add("reward/grade/tamper_fraction", float(isinstance(verdict, Tamper)), 1)
        book.add("reward/grade/score_mean", float(group.scores_G.sum()), len(group.scores_G))
        book.add("reward/group/mixed_fraction", float(not is_uniform(group.scores_G)), 1)
        lag = trained_at - group.admitted_version
        book.add("train/staleness/lag_mean", float(lag), 1)
        book.add("train/staleness/lag_max", float(lag))


def add_passes(book: MetricBook, batch: Batch, microbatches: Sequence[Microbatch], passes: Sequence[StepStats]) -> None:
    """One update's forward and backward passes."""
    num_seen = sum(len(microbatch.rows) for microbatch in microbatches)
    book.add("train/rows/skipped_fraction", float(len(batch.rows) - num_seen), len(batch.rows))
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


def add_ledger(book: MetricBook, audit: Audit) -> None:
    """The ledger's balance after the step."""
    book.add("ledger/draws/drawn", float(audit.drawn))
    book.add("ledger/draws/trained", float(audit.trained))
    book.add("ledger/draws/dropped", float(audit.dropped))
    book.add("ledger/draws/pending", float(audit.pending))


def outcome_events(group: Group, *, time_s: float) -> Iterator[Event]:
    """Events of the members that have no score."""
    for member in group.members:
        verdict = member.verdict
        if member.episode.stop is StopReason.FAILED:
            fields: dict[str, str | int | float] = {
                "episode": member.episode.id,
                "detail": member.episode.messages[-1].content,
            }
            yield Event(kind=EventKind.EPISODE_FAILED, time_s=time_s, fields=fields)
        elif isinstance(verdict, Unscored):
            fields = {"episode": member.episode.id, "reason": verdict.reason, "detail": verdict.detail}
            yield Event(kind=EventKind.EPISODE_UNSCORED, time_s=time_s, fields=fields)
