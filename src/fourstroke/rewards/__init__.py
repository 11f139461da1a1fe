"""Graders, and the one boundary where a grader's failure becomes a typed outcome. Knows nothing of the policy."""

from fourstroke.rewards.grading import grade
from fourstroke.rewards.process import GraderPool
from fourstroke.rewards.verifiers import ExactGrader, NumericGrader, exact, numeric

__all__ = ["ExactGrader", "GraderPool", "NumericGrader", "exact", "grade", "numeric"]
