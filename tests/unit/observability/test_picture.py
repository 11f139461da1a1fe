"""The picture is a PNG of its size for any records, and the smoothing is what it says."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.observability import draw_curves
from fourstroke.observability.picture import smoothed
from fourstroke.types import Estimate

BEFORE = Estimate(mean=0.1, low=0.05, high=0.2, num_tasks=200, num_samples=800)
AFTER = Estimate(mean=0.8, low=0.7, high=0.9, num_tasks=200, num_samples=800)


def _record(step: int) -> dict[str, float]:
    return {
        "step": step,
        "reward/grade/score_mean": 0.1 * step,
        "rollout/episode/length_mean": 12.0,
        "rollout/episode/truncated_fraction": 0.25,
        "train/loss/entropy": 1.0,
        "train/mismatch/mean_abs_log_ratio": 0.02,
    }


CASES = {
    "none": [],
    "one": [_record(1)],
    "many": [_record(step) for step in range(1, 6)],
    "exact": [{**_record(1), "train/mismatch/mean_abs_log_ratio": 0.0}],
    "negative": [{"step": 1, "reward/grade/score_mean": -3.0}, {"step": 2, "reward/grade/score_mean": -1.0}],
    "gaps": [_record(1), {"step": 2}, {"step": 3, "train/loss/entropy": math.nan}, _record(4)],
}


@pytest.mark.parametrize("records", CASES.values(), ids=CASES.keys())
def test_size_is_that_of_the_readme(records: list[dict[str, float]], tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    draw_curves(records, path, before=BEFORE, after=AFTER, title="a run")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1200, 800)


def test_evaluations_are_drawn(tmp_path: Path) -> None:
    images = []
    for before, after in ((None, None), (BEFORE, None), (BEFORE, AFTER)):
        draw_curves(CASES["many"], tmp_path / "curves.png", before=before, after=after)
        images.append((tmp_path / "curves.png").read_bytes())
    assert len(set(images)) == 3


@given(values=st.lists(st.integers(-100, 100)), half_width=st.integers(0, 5))
def test_smoothed_is_the_mean_of_the_neighbours(values: list[int], half_width: int) -> None:
    expected = []
    for centre in range(len(values)):
        near = [value for position, value in enumerate(values) if abs(position - centre) <= half_width]
        expected.append(sum(near) / len(near))
    assert smoothed(values, half_width=half_width) == expected
