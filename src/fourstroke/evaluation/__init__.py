"""Held-out evaluation: the training runner and grader over a fixed set of tasks, and the statistics of the result."""

from fourstroke.evaluation.evaluate import EvaluationReport, Rollouts, evaluate
from fourstroke.evaluation.lengths import LengthStats, length_stats
from fourstroke.evaluation.statistics import clustered_estimate, pass_at_k

__all__ = [
    "EvaluationReport",
    "LengthStats",
    "Rollouts",
    "clustered_estimate",
    "evaluate",
    "length_stats",
    "pass_at_k",
]
