"""Held-out evaluation: the training runner and grader over a fixed set of tasks, and the statistics of the result."""

from fourstroke.evaluation.evaluate import EvaluationReport, Rollouts, evaluate
from fourstroke.evaluation.statistics import (
    PairedDifference,
    clustered_estimate,
    paired_difference,
    pass_at_k,
    pass_hat_k,
)

__all__ = [
    "EvaluationReport",
    "PairedDifference",
    "Rollouts",
    "clustered_estimate",
    "evaluate",
    "paired_difference",
    "pass_at_k",
    "pass_hat_k",
]
