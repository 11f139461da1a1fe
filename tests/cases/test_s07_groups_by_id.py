"""S07: groups go by id, never by a fixed stride (areal-project/AReaL#1419)."""

from __future__ import annotations

import numpy as np
import pytest

from fourstroke.algorithms import advantages_by_group


def test_a_short_group_does_not_shift_the_next() -> None:
    scores = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    advantages = advantages_by_group(scores, list("PPPQQQQ"), kind="group_centred")
    assert advantages[:3] == pytest.approx([0.666667, -0.333333, -0.333333], abs=1e-6)
    assert advantages[3:].tolist() == [0.25, 0.25, -0.75, 0.25]
