"""Estimates from scores: intervals clustered by task, pass@k, pass^k, paired differences. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from scipy.special import nctdtrinc, ndtri, stdtrit

from fourstroke.errors import DataError
from fourstroke.types import Estimate

_CONFIDENCE = 0.95
# Share of comparisons that find a true difference of the minimum detectable size.
_POWER = 0.8


def clustered_estimate(scores_by_task: Sequence[np.ndarray]) -> Estimate:
    """Mean over tasks of the task's mean score, with a 95 % interval for new tasks of the same kind.

    Samples of one task are no independent evidence, so the interval is Student's t over the tasks' means (Miller 2024,
    Adding Error Bars to Evals, arXiv:2411.00640). Each task weighs the same, however many samples it has.

    The interval is clipped to [0, 1] where every score lies there, since then the mean must too; a range seen only in
    the sample is no bound on the mean.

    Two kinds of scores have Wilson's interval (1927) on as many trials as there are tasks: one score of 0 or 1 for each
    task, which are such trials; and equal means of all tasks, whose spread says nothing about the uncertainty, for
    scores taken to range over [0, 1], stretched to reach the mean.

    Args:
        scores_by_task: float [n_i] for each task, each with at least one score.

    Raises:
        DataError: Fewer than two tasks, a task without a score, or a score that is not finite.

    Example:
        >>> estimate = clustered_estimate([np.array([1.0, 0.0]), np.array([1.0, 1.0]), np.array([0.0, 0.0])])
        >>> estimate.mean, estimate.num_tasks, estimate.num_samples
        (0.5, 3, 6)
    """
    num_tasks = len(scores_by_task)
    if num_tasks < 2:
        raise DataError(f"an interval clustered by task needs two scored tasks or more, got {num_tasks}")
    lengths = np.array([len(scores) for scores in scores_by_task])
    if not lengths.all():
        raise DataError(f"task at position {int(np.argmin(lengths))} has no score; leave it out and count it")
    scores = np.concatenate(scores_by_task).astype(np.float64)
    if not np.isfinite(scores).all():
        raise DataError("a score is not finite; such an episode must be unscored")
    means = np.add.reduceat(scores, np.cumsum(lengths) - lengths) / lengths
    is_equal = bool(np.all(means == means[0]))
    mean = float(means[0]) if is_equal else float(means.mean())
    if is_equal or (len(scores) == num_tasks and bool(np.isin(scores, (0.0, 1.0)).all())):
        low, high = _wilson(mean, num_tasks)
    else:
        half = float(stdtrit(num_tasks - 1, 0.5 + _CONFIDENCE / 2) * means.std(ddof=1) / math.sqrt(num_tasks))
        low, high = mean - half, mean + half
    if scores.min() >= 0 and scores.max() <= 1:
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(mean=mean, low=low, high=high, num_tasks=num_tasks, num_samples=len(scores))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k), in whole numbers.

    Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv:2107.03374, equation 1. ``num_samples``
    counts rollouts of one task, never training rows.

    Raises:
        DataError: k is below 1 or above ``num_samples``, or ``num_correct`` is outside 0..``num_samples``.

    Example:
        >>> pass_at_k(8, 1, 8), round(pass_at_k(8, 2, 4), 6)
        (1.0, 0.785714)
    """
    _check_counts(f"pass@{k}", num_samples, num_correct, k)
    total = math.comb(num_samples, k)
    return (total - math.comb(num_samples - num_correct, k)) / total


def pass_hat_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased probability that all of k samples are correct, pass^k: C(c, k) / C(n, k), in whole numbers.

    Yao et al. 2024, tau-bench, arXiv:2406.12045, section 3.

    Raises:
        DataError: k is below 1 or above ``num_samples``, or ``num_correct`` is outside 0..``num_samples``.

    Example:
        >>> pass_hat_k(8, 8, 8), round(pass_hat_k(8, 6, 2), 6)
        (1.0, 0.535714)
    """
    _check_counts(f"pass^{k}", num_samples, num_correct, k)
    return math.comb(num_correct, k) / math.comb(num_samples, k)


class PairedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How much better the second of two evaluations is, over the tasks that both have a score of.

    Attributes:
        first: Mean of the first evaluation over those tasks.
        second: The same of the second.
        difference: ``second`` minus ``first``.
        low: Lower end of its 95 % interval.
        high: Upper end.
        minimum_detectable: Smallest true difference that such a comparison finds four times out of five: one whose
            interval then leaves out 0.
        num_tasks: Tasks that both have a score of.
        num_only_first: Tasks that only the first has a score of; they are in no mean here.
        num_only_second: The same of the second.

    Example:
        >>> paired_difference({"a": [0.0], "b": [0.0], "c": [1.0]}, {"a": [1.0], "b": [0.0], "c": [1.0]}).num_tasks
        3
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    minimum_detectable: float
    num_tasks: int
    num_only_first: int
    num_only_second: int

    @property
    def is_found(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def paired_difference(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> PairedDifference:
    """Compare two evaluations task by task.

    What makes a task hard is the same for both and falls out of its difference, so that the interval, Student's t over
    the tasks' differences of mean scores, is narrower than the two evaluations' own (Miller 2024, arXiv:2411.00640,
    section 4.2). The minimum detectable difference is that of the test's power at the spread that was seen (Bloom 1995,
    Minimum Detectable Effects), by the noncentral t.

    Where all differences are equal, d, their spread says nothing. Then Wilson's upper bound u for "0 of n tasks are
    otherwise" gives the interval, for scores taken to range over [0, 1]: the share u could lie at -1 or at 1.

    Args:
        first: Scores of each task's scored episodes, by the task's id; a task without one has an empty list.
        second: The same of the other evaluation.

    Raises:
        DataError: Fewer than two tasks have a score in both, or a score is not finite.

    Example:
        >>> once = {"a": [0.0, 1.0], "b": [0.0, 0.0], "c": [1.0, 1.0]}
        >>> found = paired_difference(once, {"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [1.0, 1.0]})
        >>> round(found.difference, 6), found.is_found
        (0.166667, False)
    """
    scored = [{task for task, scores in side.items() if len(scores)} for side in (first, second)]
    shared = sorted(scored[0] & scored[1])
    if len(shared) < 2:
        raise DataError(
            f"a comparison needs two tasks or more that both evaluations have a score of, and there are {len(shared)}; "
            "compare evaluations on the same tasks"
        )
    means = np.array([[np.mean(side[task]) for task in shared] for side in (first, second)])
    if not np.isfinite(means).all():
        raise DataError("a score is not finite; such an episode must be unscored")
    differences, num_tasks = means[1] - means[0], len(shared)
    if np.all(differences == differences[0]):
        difference = float(differences[0])
        _, otherwise = _wilson(0.0, num_tasks)
        low = difference - otherwise * max(0.0, difference + 1)
        high = difference + otherwise * max(0.0, 1 - difference)
        detectable = max(difference - low, high - difference)
    else:
        difference = float(differences.mean())
        error = float(differences.std(ddof=1)) / math.sqrt(num_tasks)
        limit = float(stdtrit(num_tasks - 1, 0.5 + _CONFIDENCE / 2))
        low, high = difference - limit * error, difference + limit * error
        detectable = error * float(nctdtrinc(num_tasks - 1, 1 - _POWER, limit))
    return PairedDifference(
        first=float(means[0].mean()),
        second=float(means[1].mean()),
        difference=difference,
        low=low,
        high=high,
        minimum_detectable=detectable,
        num_tasks=num_tasks,
        num_only_first=len(scored[0] - scored[1]),
        num_only_second=len(scored[1] - scored[0]),
    )


def _check_counts(name: str, num_samples: int, num_correct: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise DataError(f"{name} needs 1 <= k <= n, and there are n = {num_samples} samples")
    if not 0 <= num_correct <= num_samples:
        raise DataError(f"{num_correct} correct of {num_samples} samples is impossible")


def _wilson(mean: float, num_trials: int) -> tuple[float, float]:
    """Wilson's score interval for a mean of scores in [min(0, mean), max(1, mean)]."""
    bottom, top = min(0.0, mean), max(1.0, mean)
    share = (mean - bottom) / (top - bottom)
    z = float(ndtri(0.5 + _CONFIDENCE / 2))
    centre = (share + z**2 / (2 * num_trials)) / (1 + z**2 / num_trials)
    half = z * math.sqrt(share * (1 - share) / num_trials + z**2 / (4 * num_trials**2)) / (1 + z**2 / num_trials)
    # At a share of 0 or 1 one end is that share exactly; rounding must not move it past the mean.
    low, high = min(centre - half, share), max(centre + half, share)
    return bottom + low * (top - bottom), bottom + high * (top - bottom)
