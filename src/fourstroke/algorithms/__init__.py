"""Algorithms as pure functions: advantages, weights of tokens, losses, corrections; no state, no I/O, no models.

What is exported here is NumPy and runs on the controller, which never loads torch. What runs in the trainer is torch
and is imported by its module: :mod:`fourstroke.algorithms.losses`, those that it binds, ``corrections`` and ``inputs``.
"""

from fourstroke.algorithms.advantages import (
    OF_GROUP_SCORES,
    episode_advantages,
    group_advantages,
    is_uniform,
    soft_overlong_penalty,
)
from fourstroke.algorithms.aggregation import token_weights
from fourstroke.algorithms.terms import BUNDLE_TERMS, LossMetric, Term, needs_gradient, terms_of

__all__ = [
    "BUNDLE_TERMS",
    "OF_GROUP_SCORES",
    "LossMetric",
    "Term",
    "episode_advantages",
    "group_advantages",
    "is_uniform",
    "needs_gradient",
    "soft_overlong_penalty",
    "terms_of",
    "token_weights",
]
