"""Rollout: groups of one task and seed each, sampled several times, graded and stored."""

from fourstroke.rollout.pool import WorkerPool
from fourstroke.rollout.runner import Graders, GroupRunner
from fourstroke.rollout.worker import RolloutWorker

__all__ = ["Graders", "GroupRunner", "RolloutWorker", "WorkerPool"]
