"""Held-out evaluation: the training runner and grader over a fixed set of tasks, and the statistics of the result."""

from fourstroke.evaluation.evaluate import EvaluationReport, Rollouts, evaluate
from fourstroke.evaluation.statistics import clustered_estimate, pass_at_k

__all__ = [
    "EvaluationReport",
    "Rollouts",
    "clustered_estimate",
    "evaluate",
    "pass_at_k",
]
