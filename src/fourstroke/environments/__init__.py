"""Environments and tasksets: where tasks come from, how they are split, and the world that one attempt sees.

Knows nothing of the policy, of engines or of how rewards are used.
"""

from fourstroke.environments.arithmetic import arithmetic
from fourstroke.environments.reasoning_gym import reasoning_gym, reasoning_gym_grader
from fourstroke.environments.single_turn import SingleTurnEnvironment, SingleTurnTaskset
from fourstroke.environments.split import is_held_out, split, task_of

__all__ = [
    "SingleTurnEnvironment",
    "SingleTurnTaskset",
    "arithmetic",
    "is_held_out",
    "reasoning_gym",
    "reasoning_gym_grader",
    "split",
    "task_of",
]
