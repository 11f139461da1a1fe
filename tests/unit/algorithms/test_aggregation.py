"""Weights of tokens against plain loops and numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.algorithms import token_weights

KINDS = ("token_mean", "sequence_mean", "sequence_sum", "constant")


def reference(counts: list[int], kind: str, max_tokens: int) -> list[float]:
    weights = []
    for count in counts:
        if count == 0:
            weights.append(0.0)
        elif kind == "token_mean":
            weights.append(1 / sum(counts))
        elif kind == "sequence_mean":
            weights.append(1 / len(counts) / count)
        elif kind == "sequence_sum":
            weights.append(1 / len(counts))
        else:
            weights.append(1 / len(counts) / max_tokens)
    return weights


@pytest.mark.parametrize("kind", KINDS)
@given(counts=st.lists(st.integers(0, 50), max_size=20), max_tokens=st.integers(50, 99))
def test_equals_plain_loops(kind: str, counts: list[int], max_tokens: int) -> None:
    found = token_weights(counts, kind=kind, max_tokens=max_tokens)
    np.testing.assert_allclose(found, reference(counts, kind, max_tokens), rtol=1e-14)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [1 / 10, 0.0, 1 / 10]),  # 2 + 0 + 8 tokens
        ("sequence_mean", [1 / 6, 0.0, 1 / 24]),  # 3 sequences: 1/(3*2), -, 1/(3*8)
        ("sequence_sum", [1 / 3, 0.0, 1 / 3]),
        ("constant", [1 / 48, 0.0, 1 / 48]),  # 1/(3*16)
    ],
)
def test_a_row_without_loss_tokens_counts_as_a_sequence(kind: str, expected: list[float]) -> None:
    np.testing.assert_allclose(token_weights([2, 0, 8], kind=kind, max_tokens=16), expected, rtol=1e-15)


@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_means_sum_to_one(counts: list[int]) -> None:
    for kind in ("token_mean", "sequence_mean"):
        assert abs(float(token_weights(counts, kind=kind, max_tokens=50) @ counts) - 1) < 1e-12
