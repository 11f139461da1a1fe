"""How many groups may be in flight: bookkeeping only, no I/O and no waiting.

P groups make a step and S is the staleness bound. There are ``(S + 1) * P`` slots (the window W is 1). A slot is taken
at admission and given back when the step that trained its group has landed on the engine, or at once when its group is
dropped.

Why this bounds the lag: take a group admitted at version v. Steps train the oldest groups first, P at a time, and each
landed step adds one version and frees P slots. When the group is admitted at most (S + 1) * P - 1 others are untrained,
all of them older, so at most S full steps of older groups train before it, or it is itself in the last of S + 1 steps.
Hence it trains at version v + S at the latest. With S = 0 a step's groups are all sampled at the version that it
trains from.
"""

from __future__ import annotations


class Slots:
    """Counts of slots taken and free.

    Example:
        >>> slots = Slots(groups_per_step=4, staleness=0)
        >>> slots.take(); slots.num_free
        3
    """

    def __init__(self, *, groups_per_step: int, staleness: int) -> None:
        self._capacity = (staleness + 1) * groups_per_step
        self._num_taken = 0

    @property
    def num_free(self) -> int:
        """Slots that a draw may take now."""
        return self._capacity - self._num_taken

    def take(self) -> None:
        """Take one slot for a draw that is admitted."""
        assert self.num_free > 0, self._num_taken
        self._num_taken += 1

    def give_back(self, num_groups: int) -> None:
        """Free the slots of groups that were dropped, or whose step has landed."""
        assert 0 <= num_groups <= self._num_taken, (num_groups, self._num_taken)
        self._num_taken -= num_groups
