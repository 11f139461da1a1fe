"""A step's record does not depend on how its rows were cut into micro-batches and ranks, nor on who reports first.

The real loss sums each part; the expected values are plain float64 loops over all loss tokens of the step.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.algorithms import LossMetric
from fourstroke.algorithms.inputs import LossInputs
from fourstroke.algorithms.losses import bind_loss
from fourstroke.config import AlgorithmConfig
from fourstroke.observability import MetricBook
from fourstroke.orchestration import measures
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.types import Microbatch, StepStats

CONFIG = AlgorithmConfig.model_validate({"name": "grpo", "correction": "token", "correction_cap": 1.1})


class Step:
    """Random loss tokens of some rows."""

    def __init__(self, lengths, seed):
        rng = np.random.default_rng(seed)
        self.rows = [slice(sum(lengths[:row]), sum(lengths[: row + 1])) for row in range(len(lengths))]
        num_tokens = sum(lengths)
        self.current = -rng.gamma(2.0, 1.0, num_tokens)
        self.behaviour = self.current + 0.3 * rng.standard_normal(num_tokens)
        self.proximal = self.current + 0.3 * rng.standard_normal(num_tokens)
        self.entropy = rng.gamma(2.0, 1.0, num_tokens)
        self.advantages = rng.standard_normal(num_tokens)

    def stats(self, rows):
        """What the trainer reports of a micro-batch of these rows."""
        tokens = [token for row in rows for token in range(self.rows[row].start, self.rows[row].stop)]
        if not tokens:
            return StepStats(sums={}, num_tokens=0)
        columns = {"logprobs_N": self.current, "entropy_N": self.entropy, "behaviour_logprobs_N": self.behaviour}
        columns |= {"proximal_logprobs_N": self.proximal, "advantages_N": self.advantages}
        inputs = LossInputs(
            **{name: torch.from_numpy(values[tokens]) for name, values in columns.items()},
            weight_N=torch.full((len(tokens),), 1 / len(self.current), dtype=torch.float64),
            sequence_N=torch.zeros(len(tokens), dtype=torch.int64),
            row_ids=("row",),
        )
        output = bind_loss(CONFIG)(inputs)
        return StepStats(
            sums={metric.value: float(value) for metric, value in output.sums.items()}, num_tokens=len(tokens)
        )

    def expected(self):
        """The step's means, token by token."""
        totals = dict.fromkeys(LossMetric, 0.0)
        num_tokens = len(self.current)
        for now, then, start, entropy, advantage in zip(
            self.current, self.behaviour, self.proximal, self.entropy, self.advantages, strict=True
        ):
            ratio, weight = math.exp(now - start), math.exp(start - then)
            held = min(max(ratio, 1 - CONFIG.clip_low), 1 + CONFIG.clip_high)
            loss = max(-advantage * ratio, -advantage * held)
            is_clipped = -advantage * held > -advantage * ratio
            if CONFIG.dual_clip is not None and advantage < 0 and loss > -advantage * CONFIG.dual_clip:
                loss, is_clipped = -advantage * CONFIG.dual_clip, True
            totals[LossMetric.LOSS] += min(weight, 1.1) * loss / num_tokens
            totals[LossMetric.ENTROPY] += entropy / num_tokens
            totals[LossMetric.CLIPPED] += is_clipped / num_tokens
            totals[LossMetric.IMPORTANCE_WEIGHT] += min(weight, 1.1) / num_tokens
            totals[LossMetric.TRUNCATED] += (weight > 1.1) / num_tokens
            totals[LossMetric.LOG_RATIO] += (now - then) / num_tokens
            totals[LossMetric.ABS_LOG_RATIO] += abs(now - then) / num_tokens
        return totals


NAMES = {
    "train/loss/loss": LossMetric.LOSS,
    "train/loss/entropy": LossMetric.ENTROPY,
    "train/loss/clipped_fraction": LossMetric.CLIPPED,
    "train/correction/weight_mean": LossMetric.IMPORTANCE_WEIGHT,
    "train/correction/truncated_fraction": LossMetric.TRUNCATED,
    "train/mismatch/mean_log_ratio": LossMetric.LOG_RATIO,
    "train/mismatch/mean_abs_log_ratio": LossMetric.ABS_LOG_RATIO,
}


@st.composite
def _cuts(draw):
    """Lengths of rows, and the rows dealt to parts in any order; a part may be empty, as a rank's may."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(lengths))))
    num_parts = draw(st.integers(1, 5))
    part_of = draw(st.lists(st.integers(0, num_parts - 1), min_size=len(lengths), max_size=len(lengths)))
    parts = [
        tuple(row for row, part in zip(order, part_of, strict=True) if part == number) for number in range(num_parts)
    ]
    return lengths, parts


@given(cut=_cuts(), seed=st.integers(0, 2**16))
def test_any_split_of_a_step_gives_the_same_record(cut, seed):
    lengths, parts = cut
    step, book = Step(lengths, seed), MetricBook(step=1)

    passes = [step.stats(rows) for rows in parts]
    measures.add_passes(
        book, num_rows=len(lengths), microbatches=[Microbatch(rows=p) for p in parts if p], passes=passes
    )

    record, expected = book.record(), step.expected()
    for name, metric in NAMES.items():
        assert record[name] == pytest.approx(expected[metric], rel=1e-9, abs=1e-12), name
    assert record["train/rows/skipped_fraction"] == 0.0
    assert measures.mean_abs_log_ratio(passes) == pytest.approx(expected[LossMetric.ABS_LOG_RATIO], rel=1e-9)


@given(
    scores=st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.5, None]), min_size=2, max_size=5), min_size=1, max_size=6),
    data=st.data(),
)
def test_any_order_and_cut_of_the_groups_gives_the_same_record(scores, data):
    groups = [make_record(make_group(members, index=index, version=index)) for index, members in enumerate(scores)]
    whole, cut = MetricBook(step=1), MetricBook(step=1)
    measures.add_groups(whole, groups, trained_at=9)

    order = data.draw(st.permutations(groups))
    at = data.draw(st.integers(0, len(order)))
    measures.add_groups(cut, order[at:], trained_at=9)
    measures.add_groups(cut, order[:at], trained_at=9)

    assert cut.record() == pytest.approx(whole.record(), rel=1e-12)
    scored = [score for members in scores for score in members if score is not None]
    if scored:
        assert whole.record()["reward/grade/score_mean"] == pytest.approx(sum(scored) / len(scored), rel=1e-12)
