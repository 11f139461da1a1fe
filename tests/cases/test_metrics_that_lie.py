"""Metrics that told other systems' users what was not so; the numbers are small enough to follow by hand."""

import asyncio
import math

import msgspec
import pytest
import torch

from fourstroke.algorithms import LossMetric, needs_gradient
from fourstroke.algorithms.inputs import LossInputs
from fourstroke.algorithms.losses import bind_loss
from fourstroke.config import AlgorithmConfig, load_config
from fourstroke.errors import DataError
from fourstroke.evaluation import evaluate
from fourstroke.observability import MetricBook
from fourstroke.orchestration import measures
from fourstroke.orchestration.batching import build_batches
from fourstroke.testing.environment import FakeTaskset
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.types import Microbatch, StepStats

GRPO = AlgorithmConfig.model_validate({"name": "grpo", "correction": "token", "correction_cap": 2.0})


def _groups(*scores):
    return [make_record(make_group(members, index=index)) for index, members in enumerate(scores)]


def _passed(passes, *, rows=(0,)):
    book = MetricBook(step=1)
    microbatches = [Microbatch(rows=rows) for _ in passes]
    measures.add_passes(book, num_rows=len(rows) * len(passes), microbatches=microbatches, passes=passes)
    return book.record()


def _stats(num_tokens, **sums):
    return StepStats(sums=dict.fromkeys((metric.value for metric in LossMetric), 0.0) | sums, num_tokens=num_tokens)


def _inputs(current, behaviour, *, advantage=1.0, weight=None):
    tensors = [torch.tensor(values, dtype=torch.float64) for values in (current, behaviour)]
    full = torch.ones(len(current), dtype=torch.float64)
    return LossInputs(
        logprobs_N=tensors[0], entropy_N=full, behaviour_logprobs_N=tensors[1], proximal_logprobs_N=tensors[0],
        advantages_N=advantage * full, weight_N=full / len(current) if weight is None else weight * full,
        sequence_N=torch.zeros(len(current), dtype=torch.int64), row_ids=("e0000-i000003.1/0",),
    )  # fmt: skip


def test_the_share_without_gradient_is_that_of_the_rows_and_not_always_one():
    """PrimeIntellect-ai/prime-rl#3249: the share of zero gradients cost a third of a step and read 1.0 each time.

    It is counted from scores: two of four groups are mixed, and six of ten rows train nothing.
    """
    groups = _groups([1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0])
    book = MetricBook(step=1)
    (batch,) = build_batches(groups, step=1, algorithm=GRPO, max_tokens=8)
    seen = needs_gradient(batch.rows, config=GRPO)

    measures.add_groups(book, groups, trained_at=0)
    measures.add_passes(book, num_rows=len(batch.rows), microbatches=[Microbatch(rows=seen)], passes=[_stats(12)])

    assert book.record()["reward/group/mixed_fraction"] == 0.5
    assert book.record()["train/rows/skipped_fraction"] == 0.6


def test_a_whole_and_its_parts_have_one_denominator():
    """prime-rl#2478: over all environments a mean of the rows' means, for each one a mean over tokens.

    One token 1.0 apart and nine 0.1 apart are 0.19 apart in the mean; the mean of the two means is 0.55.
    """
    parts = [_stats(1, abs_log_ratio=1.0), _stats(9, abs_log_ratio=0.9)]

    whole = _passed(parts)["train/mismatch/mean_abs_log_ratio"]

    assert whole == pytest.approx(0.19, rel=1e-12)
    assert measures.mean_abs_log_ratio(parts) == pytest.approx(whole, rel=1e-12)
    each = [_passed([part])["train/mismatch/mean_abs_log_ratio"] for part in parts]
    assert whole == pytest.approx((1 * each[0] + 9 * each[1]) / 10, rel=1e-12)


def test_k_is_the_configured_number_of_samples_however_many_rows_they_became():
    """prime-rl#3328 named a mean of two samples avg@4, since each had become two rows for training.

    So with radixark/miles#3154: the n of pass@k counts rollouts, not rows.
    """

    class Rollouts:
        async def run(self, assignments, *, is_together):
            del is_together
            records = []
            for assignment in assignments:
                record = make_record(make_group([float(assignment.draw.index == 0), 0.0]))
                episodes = tuple(msgspec.structs.replace(one, rows=2 * one.rows) for one in record.episodes)
                records.append(msgspec.structs.replace(record, draw=assignment.draw, episodes=episodes))
            return tuple(records)

    config = load_config({"evaluation": {"samples_per_task": 2, "pass_at": [1, 2]}})
    tasks = FakeTaskset(num_held_out=4).held_out

    report = asyncio.run(evaluate(tasks, name="before", rollouts=Rollouts(), config=config, version=0))

    assert report.pass_at == {1: 0.125, 2: 0.25}
    assert report.pass_hat == {1: 0.125, 2: 0.0}
    assert (report.estimate.num_tasks, report.estimate.num_samples) == (4, 8)


def test_the_log_ratio_is_the_plain_difference_whatever_the_loss_does_with_it():
    """THUDM/slime#2114: the KL in the log was not the one of the tokens.

    Differences 0.5 and -1: mean -0.25, absolute 0.75; neither the weights of the loss nor of the correction are in it.
    """
    output = bind_loss(GRPO)(_inputs([-1.0, -2.0], [-1.5, -1.0], advantage=3.0, weight=0.01))
    stats = StepStats(sums={metric.value: float(value) for metric, value in output.sums.items()}, num_tokens=2)

    record = _passed([stats])

    assert record["train/mismatch/mean_log_ratio"] == pytest.approx(-0.25, rel=1e-12)
    assert record["train/mismatch/mean_abs_log_ratio"] == pytest.approx(0.75, rel=1e-12)
    assert record["train/correction/weight_mean"] == pytest.approx((math.exp(0.5) + math.exp(-1.0)) / 2, rel=1e-12)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_advantages_are_whitened_over_their_own_group(order):
    """slime#2235: whitened over another set of members than the group.

    Scores 1, 0 become 1, -1; scores 10, 10, 10, 14 become -1/sqrt(3) three times, and sqrt(3).
    """
    algorithm = AlgorithmConfig.model_validate({"name": "grpo", "advantage": "group_standardised"})
    groups = _groups([1.0, 0.0], [10.0, 10.0, 10.0, 14.0])

    (batch,) = build_batches([groups[index] for index in order], step=1, algorithm=algorithm, max_tokens=8)

    by_group = {group.id: [row.advantage for row in batch.rows if row.group == group.id] for group in groups}
    assert by_group[groups[0].id] == pytest.approx([1.0, -1.0], rel=1e-12)
    assert by_group[groups[1].id] == pytest.approx([-1 / math.sqrt(3)] * 3 + [math.sqrt(3)], rel=1e-12)


def test_a_token_that_is_no_number_is_in_no_denominator():
    """pytorch/torchtitan#4174: tokens without a finite log-probability left the sum and stayed in the denominator.

    Here such a row is refused by name, and a member without a score has no token in the denominator.
    """
    with pytest.raises(DataError, match=r"^row e0000-i000003.1/0: the behaviour log-probability .* is -inf"):
        bind_loss(GRPO)(_inputs([-1.0, -2.0], [-1.0, -math.inf]))

    scored_only, with_failed = _groups([1.0, 0.0]), _groups([1.0, 0.0, None])
    for groups in (scored_only, with_failed):
        (batch,) = build_batches(groups, step=1, algorithm=GRPO, max_tokens=8)
        assert batch.num_loss_tokens == 6
        assert sum(row.weight * row.num_loss_tokens for row in batch.rows) == pytest.approx(1.0, rel=1e-12)


def test_the_gradient_norm_is_that_of_the_step_however_it_was_cut():
    """NVIDIA-NeMo/RL#3660 (cf. #1426): reduced or reported for each chunk, it grew with the number of chunks."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    loss = bind_loss(AlgorithmConfig.model_validate({"name": "grpo"}))

    def gradient(*chunks):
        total = torch.zeros(4, dtype=torch.float64)
        for chunk in chunks:
            part = logprobs[chunk]
            inputs = _inputs([0.0] * len(chunk), part.tolist(), advantage=2.0, weight=0.25)
            inputs = LossInputs(**{**_fields(inputs), "logprobs_N": part, "proximal_logprobs_N": part.detach()})
            (part_gradient,) = torch.autograd.grad(loss(inputs).loss_sum, logprobs)
            total += part_gradient
        return total

    # Each token's gradient is -2 / 4: the norm is sqrt(4 * 0.25) = 1. Norms of four chunks would add up to 2.
    assert gradient([0, 1, 2, 3]).norm().item() == pytest.approx(1.0, rel=1e-12)
    assert gradient([2], [0], [3], [1]).norm().item() == pytest.approx(1.0, rel=1e-12)
    book = MetricBook(step=1)
    measures.add_passes(
        book, num_rows=4, microbatches=[Microbatch(rows=(n,)) for n in range(4)], passes=[_stats(1)] * 4
    )
    measures.add_update(book, StepStats(sums={"grad_norm": 1.0, "learning_rate": 1e-5}, num_tokens=0))
    assert book.record()["train/optim/grad_norm"] == 1.0


def _fields(inputs):
    names = ("entropy_N", "behaviour_logprobs_N", "advantages_N", "weight_N", "sequence_N", "row_ids")
    return {name: getattr(inputs, name) for name in names}
