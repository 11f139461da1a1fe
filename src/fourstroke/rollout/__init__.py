"""Rollout: one group is one environment and seed, sampled several times, and graded."""

from fourstroke.rollout.runner import GroupRunner

__all__ = ["GroupRunner"]
