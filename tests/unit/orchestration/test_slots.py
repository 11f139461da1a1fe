"""Slots bound the lag: a lag is the version trained on minus the version at admission."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.orchestration.slots import Slots


@given(st.integers(0, 3), st.integers(1, 5), st.data())
def test_the_lag_never_exceeds_the_staleness_bound(staleness, groups_per_step, data):
    """An adversary chooses whether to admit or to train; the oldest P groups train first."""
    slots = Slots(groups_per_step=groups_per_step, staleness=staleness)
    version, waiting, lags = 0, [], []
    for _ in range(60):
        can_train, can_admit = len(waiting) >= groups_per_step, slots.num_free > 0
        if can_train and not (can_admit and data.draw(st.booleans())):
            lags += [version - admitted for admitted in waiting[:groups_per_step]]
            waiting = waiting[groups_per_step:]
            version += 1
            slots.give_back(groups_per_step)
        elif can_admit:
            slots.take()
            waiting.append(version)
    assert lags
    assert max(lags) <= staleness


def test_more_than_there_are_is_a_programmers_mistake():
    slots = Slots(groups_per_step=1, staleness=0)
    slots.take()
    with pytest.raises(AssertionError):
        slots.take()
    with pytest.raises(AssertionError):
        slots.give_back(2)
