"""How many groups may be in flight: bookkeeping only, no I/O and no waiting.

P groups make a step, S is the staleness bound, W the window. There are

    C = (S + 1) * P - (W - 1)      slots, with W <= S * P + 1 so that C >= P.

A slot is taken at admission and given back when the step that trained its group has landed on every engine that may be
routed to, or at once when its group is dropped. Groups are numbered by admission. While the oldest group that no step
has taken has number h, nothing numbered h + W or later is taken (``buffer`` sees to that).

Why no group is trained more than S versions after its admission. A version counts publications, one a step. Take a
group g admitted at version v, and look at the steps that land after its admission and before the step that trains g
begins; say there are n. Each consists of P groups, none of them g, and none of them given back at g's admission: a
group whose step has landed was counted in v. So each of those n * P groups is of one of two kinds:

* it held a slot when g was admitted; of these there are at most C - 1, since g holds one itself;
* it was admitted after g, and taken before g; it was taken while h <= number of g, so its number is below that of g
  plus W, and there are at most W - 1.

Hence n * P <= (C - 1) + (W - 1) = (S + 1) * P - 1, so n <= S. A dropped group gives its slot back and its replacement
enters at the tail, which makes it of the second kind. A short last step has no later one. The version that trains g is
v + n, so its lag is n <= S; with S = 0 a step's groups are all sampled at the version that they train.

The same count bounds groups that a resumed run takes over: the one at position i of the new order is trained by step
number (i + W - 1) // P at the latest, counted from 0 (``restore`` uses it).
"""

from __future__ import annotations


class Slots:
    """Counts of slots taken and free.

    Args:
        groups_per_step: P.
        staleness: S.
        window: W.

    Example:
        >>> slots = Slots(groups_per_step=4, staleness=2, window=3)
        >>> slots.take(); slots.num_free
        9
    """

    def __init__(self, *, groups_per_step: int, staleness: int, window: int = 1) -> None:
        assert 1 <= window <= staleness * groups_per_step + 1, (window, staleness, groups_per_step)
        self._capacity = (staleness + 1) * groups_per_step - (window - 1)
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
