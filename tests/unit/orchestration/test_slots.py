"""The proof in ``slots``, attacked: every history of small runs is searched for a lag above the bound."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from fourstroke.orchestration.slots import Slots

SIZES = [
    (staleness, groups_per_step, window)
    for staleness, groups_per_step in itertools.product(range(3), range(1, 4))
    for window in range(1, staleness * groups_per_step + 2)
]


def _capacity(staleness, groups_per_step, window):
    return Slots(groups_per_step=groups_per_step, staleness=staleness, window=window).num_free


@dataclasses.dataclass(frozen=True)
class History:
    """Where a history stands, as far as the lag of one group goes: the marked one.

    Attributes:
        untaken: Admission numbers of the untaken groups, counted from the oldest of them.
        next_number: Number of the next admission, counted alike.
        num_taken: Groups that were taken and whose step has not landed.
        mark: Number of the marked group among the untaken, None before its admission and once it is taken.
        place: Its place among the taken, once it is one.
        age: Versions published since its admission.
        num_drops: Drops that may still come; without an end to them there would be no end of histories.
    """

    untaken: tuple[int, ...] = ()
    next_number: int = 0
    num_taken: int = 0
    mark: int | None = None
    place: int | None = None
    age: int = 0
    num_drops: int = 2

    def without(self, number: int) -> History:
        """One untaken group fewer; numbers are counted anew."""
        left = tuple(other for other in self.untaken if other != number)
        shift = left[0] if left else self.next_number
        return dataclasses.replace(
            self,
            untaken=tuple(other - shift for other in left),
            next_number=self.next_number - shift,
            mark=None if self.mark in (None, number) else self.mark - shift,
        )

    def moves(self, *, capacity: int, groups_per_step: int, window: int) -> Iterator[History]:
        """What an adversary may do next: who is admitted, finishes, is dropped or trained when, is all its choice.

        A group that finishes within the window is taken at once, so to finish and to be taken are one move.
        """
        is_marked = self.mark is not None or self.place is not None
        if len(self.untaken) + self.num_taken < capacity:
            admitted = dataclasses.replace(
                self, untaken=(*self.untaken, self.next_number), next_number=self.next_number + 1
            )
            yield admitted
            if not is_marked:
                yield dataclasses.replace(admitted, mark=self.next_number)
        for number in self.untaken:
            if number != self.mark and self.num_drops:
                yield dataclasses.replace(self.without(number), num_drops=self.num_drops - 1)
            if number < window:
                place = self.num_taken if number == self.mark else self.place
                yield dataclasses.replace(self.without(number), num_taken=self.num_taken + 1, place=place)
        if self.num_taken >= groups_per_step and (self.place is None or self.place >= groups_per_step):
            yield dataclasses.replace(
                self,
                num_taken=self.num_taken - groups_per_step,
                place=None if self.place is None else self.place - groups_per_step,
                age=self.age + is_marked,
            )


def _largest_lag(*, capacity, groups_per_step, window, stop_above):
    """The largest lag of the marked group in any history; the search ends at the first above ``stop_above``."""
    seen, left, largest = {History()}, [History()], 0
    while left and largest <= stop_above:
        history = left.pop()
        if history.place is not None and history.place < groups_per_step <= history.num_taken:
            largest = max(largest, history.age)  # its step begins now
        for move in history.moves(capacity=capacity, groups_per_step=groups_per_step, window=window):
            if move not in seen:
                seen.add(move)
                left.append(move)
    return largest


@pytest.mark.parametrize(("staleness", "groups_per_step", "window"), SIZES)
def test_no_history_passes_the_bound_and_one_reaches_it(staleness, groups_per_step, window):
    capacity = _capacity(staleness, groups_per_step, window)

    largest = _largest_lag(capacity=capacity, groups_per_step=groups_per_step, window=window, stop_above=staleness)

    # With the widest window there are P slots: no step is whole without the marked group, and its lag is 0.
    assert largest == (staleness if capacity > groups_per_step else 0)


@pytest.mark.parametrize(("staleness", "groups_per_step", "window"), SIZES)
def test_one_slot_more_breaks_the_bound(staleness, groups_per_step, window):
    capacity = _capacity(staleness, groups_per_step, window) + 1

    largest = _largest_lag(capacity=capacity, groups_per_step=groups_per_step, window=window, stop_above=staleness)

    assert largest == staleness + 1


@pytest.mark.parametrize("window", range(1, 5))
def test_a_group_is_overtaken_by_no_more_than_the_window_lets(window):
    """What ``restore`` counts on: of groups admitted in order, number i is taken as number i + W - 1 at the latest."""

    def orders(untaken):
        if not untaken:
            yield ()
        for number in untaken:
            if number < untaken[0] + window:
                for later in orders(tuple(other for other in untaken if other != number)):
                    yield (number, *later)

    latest = [max(order.index(number) for order in orders(tuple(range(7)))) for number in range(7)]

    assert latest == [min(number + window - 1, 6) for number in range(7)]


def test_slots_are_counted():
    slots = Slots(groups_per_step=4, staleness=2, window=3)
    assert slots.num_free == 3 * 4 - 2

    slots.take()
    slots.take()
    slots.give_back(1)

    assert slots.num_free == 9


def test_more_than_there_are_is_a_programmers_mistake():
    slots = Slots(groups_per_step=1, staleness=0)
    slots.take()
    with pytest.raises(AssertionError):
        slots.take()
    with pytest.raises(AssertionError):
        slots.give_back(2)


@pytest.mark.parametrize(("staleness", "window"), [(0, 2), (2, 10), (0, 0)])
def test_a_window_that_leaves_a_step_without_slots_is_a_programmers_mistake(staleness, window):
    with pytest.raises(AssertionError):
        Slots(groups_per_step=4, staleness=staleness, window=window)
