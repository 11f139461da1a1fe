"""S21: episodes that arrive interleaved are grouped by prompt (PrimeIntellect-ai/prime-rl#600)."""

from __future__ import annotations

import numpy as np
import pytest

from fourstroke.algorithms import advantages_by_group, is_uniform


@pytest.mark.parametrize("kind", ["group_centred", "group_standardised"])
def test_interleaved_groups_without_variance_give_zeros(kind: str) -> None:
    scores, groups = np.array([1.0, 0.0, 1.0, 0.0]), np.array(list("PQPQ"))
    assert advantages_by_group(scores, groups.tolist(), kind=kind).tolist() == [0.0] * 4
    assert [is_uniform(scores[groups == group]) for group in "PQ"] == [True, True]
