"""The catalogue of metrics as data, and the book that reduces a step's additions to one record.

A metric is named ``room/phase/quantity`` (durations of a step: ``time/quantity``), and says what it is counted over and
divided by. The parts of a run add totals and counts; they never divide, since a mean of means depends on how the work
was cut. A metric whose population is empty in a step is absent from the step's record: there is no mean of nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reducer(StrEnum):
    """How the additions of a step become one value."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a number means.

    Attributes:
        name: ``room/phase/quantity``.
        unit: Unit of the value; "1" for shares and other pure numbers.
        population: The things that are counted or measured.
        denominator: What the total is divided by; empty unless the reducer is the mean.
        reducer: How additions are reduced.
        is_timing: Whether the value depends on the machine's speed; all others repeat in deterministic mode.

    Example:
        >>> METRICS["reward/grade/score_mean"].population
        'scored episodes of the step'
    """

    name: str
    unit: str
    population: str
    denominator: str
    reducer: Reducer
    is_timing: bool


def _mean(name: str, unit: str, *, population: str, over: str = "", is_timing: bool = False) -> Metric:
    """A total over a count; ``over`` is the denominator where it is not the population itself."""
    return Metric(
        name=name,
        unit=unit,
        population=population,
        denominator=over or population,
        reducer=Reducer.MEAN,
        is_timing=is_timing,
    )


def _plain(name: str, unit: str, *, population: str, reducer: Reducer, is_timing: bool = False) -> Metric:
    """A value that is not divided."""
    return Metric(name=name, unit=unit, population=population, denominator="", reducer=reducer, is_timing=is_timing)


# Populations that several metrics share; one text each, so that equal words mean equal things.
_EPISODES = "episodes of the groups that the step trains on"
_ANSWERED = "episodes of the groups that the step trains on, those that failed or were aborted excepted"
_SCORED = "scored episodes of the step"
_GROUPS = "groups that the step trains on"
_ROWS = "rows of the step's batches"
_MODEL_TOKENS = "loss tokens of rows that went through the model"
_UPDATES = "optimiser updates of the step"
_DRAWS = "draws of the run so far"
_STEP = "the step"

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _plain(
            "rollout/generate/tokens",
            "tokens",
            population="tokens sampled for the step, those of retried and dropped groups included",
            reducer=Reducer.SUM,
        ),
        _mean(
            "rollout/generate/tokens_per_second",
            "tokens/s",
            population="tokens sampled for the step, those of retried and dropped groups included",
            over="seconds during which the step's requests were at the engine",
            is_timing=True,
        ),
        _mean("rollout/episode/length_mean", "tokens", population=_ANSWERED),
        _mean("rollout/episode/truncated_fraction", "1", population="episodes stopped by LENGTH", over=_ANSWERED),
        _mean(
            "rollout/episode/failed_fraction", "1", population="episodes that failed or were aborted", over=_EPISODES
        ),
        _mean("reward/grade/score_mean", "1", population=_SCORED),
        _mean("reward/grade/unscored_fraction", "1", population="episodes with an Unscored verdict", over=_EPISODES),
        _mean("reward/grade/tamper_fraction", "1", population="episodes with a Tamper verdict", over=_EPISODES),
        _mean(
            "reward/group/mixed_fraction",
            "1",
            population="groups whose scored members do not all have one score",
            over=_GROUPS,
        ),
        _mean("train/loss/loss", "1", population="weighted sums of token losses", over=_UPDATES),
        _mean("train/loss/entropy", "nats", population=_MODEL_TOKENS),
        _mean("train/loss/clipped_fraction", "1", population="tokens where the clip binds", over=_MODEL_TOKENS),
        _mean("train/correction/weight_mean", "1", population=_MODEL_TOKENS),
        _mean(
            "train/correction/truncated_fraction",
            "1",
            population="tokens whose importance weight was cut at the cap",
            over=_MODEL_TOKENS,
        ),
        _mean("train/mismatch/mean_abs_log_ratio", "nats", population=_MODEL_TOKENS),
        _mean("train/mismatch/mean_log_ratio", "nats", population=_MODEL_TOKENS),
        _mean(
            "train/rows/skipped_fraction",
            "1",
            population="rows without gradient, which did not go through the model",
            over=_ROWS,
        ),
        _mean("train/optim/grad_norm", "1", population="gradient norms before the clip", over=_UPDATES),
        _plain("train/optim/learning_rate", "1", population="the step's last update", reducer=Reducer.LAST),
        _plain(
            "weights/canary/difference",
            "nats",
            population="mean |difference| of trainer and engine on the canary's tokens; the engine that differs most",
            reducer=Reducer.LAST,
        ),
        _mean(
            "weights/publication/changed_fraction",
            "1",
            population="published weights whose bits differ from those published before",
            over="published weights",
        ),
        _mean("train/staleness/lag_mean", "versions", population=_GROUPS),
        _plain("train/staleness/lag_max", "versions", population=_GROUPS, reducer=Reducer.MAX),
        _mean(
            "train/staleness/token_lag_mean",
            "versions",
            population="sampled tokens of the groups that the step trains on: the version trained minus their own",
        ),
        _plain("time/step_s", "s", population=_STEP, reducer=Reducer.SUM, is_timing=True),
        _plain("time/wait_s", "s", population=_STEP, reducer=Reducer.SUM, is_timing=True),
        _plain("time/rollout_s", "s", population=_STEP, reducer=Reducer.SUM, is_timing=True),
        _plain("time/train_s", "s", population=_STEP, reducer=Reducer.SUM, is_timing=True),
        _plain("time/publish_s", "s", population=_STEP, reducer=Reducer.SUM, is_timing=True),
        _plain("ledger/draws/drawn", "draws", population=_DRAWS, reducer=Reducer.LAST),
        _plain("ledger/draws/trained", "draws", population=_DRAWS, reducer=Reducer.LAST),
        _plain("ledger/draws/dropped", "draws", population=_DRAWS, reducer=Reducer.LAST),
        _plain("ledger/draws/pending", "draws", population=_DRAWS, reducer=Reducer.LAST),
    )
}


class MetricBook:
    """Additions of one step, reduced on demand.

    Example:
        >>> book = MetricBook(step=3)
        >>> book.add("reward/grade/score_mean", 2.0, 8)
        >>> book.add("reward/grade/score_mean", 1.0, 4)
        >>> book.record()
        {'step': 3, 'reward/grade/score_mean': 0.25}
    """

    def __init__(self, *, step: int) -> None:
        self._step = step
        self._totals: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add to a metric of :data:`METRICS`.

        Args:
            name: The metric.
            total: Sum over some of its population (mean, sum), or a value (max, last).
            count: How much of the denominator the total covers; only a mean has one. May be 0 with a total of 0.
        """
        assert name in METRICS, f"no metric {name!r}; add it to METRICS"
        reducer = METRICS[name].reducer
        assert reducer is Reducer.MEAN or count == 1.0, (name, reducer, count)
        assert count > 0 or (count == 0 and total == 0), (name, total, count)
        before = self._totals.get(name)
        if before is None or reducer is Reducer.LAST:
            self._totals[name] = total
        elif reducer is Reducer.MAX:
            self._totals[name] = max(before, total)
        else:
            self._totals[name] = before + total
        self._counts[name] = self._counts.get(name, 0.0) + count

    def record(self) -> dict[str, float]:
        """The step's number as ``step`` and the value of each metric that has one, in the catalogue's order."""
        record: dict[str, float] = {"step": self._step}
        for name, metric in METRICS.items():
            if metric.reducer is not Reducer.MEAN and name in self._totals:
                record[name] = self._totals[name]
            elif self._counts.get(name, 0.0) > 0:
                record[name] = self._totals[name] / self._counts[name]
        return record
