"""Held-out evaluation: the training runner and grader over a fixed set of tasks, and the statistics of the result."""

from fourstroke.evaluation.comparison import Comparison, compare_runs, in_words, read_evaluations
from fourstroke.evaluation.evaluate import EvaluationReport, Rollouts, counted_apart, evaluate
from fourstroke.evaluation.statistics import (
    PairedDifference,
    clustered_estimate,
    paired_difference,
    pass_at_k,
    pass_hat_k,
)

__all__ = [
    "Comparison",
    "EvaluationReport",
    "PairedDifference",
    "Rollouts",
    "clustered_estimate",
    "compare_runs",
    "counted_apart",
    "evaluate",
    "in_words",
    "paired_difference",
    "pass_at_k",
    "pass_hat_k",
    "read_evaluations",
]
