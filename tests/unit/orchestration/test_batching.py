"""From records to optimiser batches: advantages and weights worked out by hand, and counts over whole updates."""

import msgspec
import pytest

from fourstroke.config import AlgorithmConfig
from fourstroke.errors import DataError
from fourstroke.orchestration.batching import build_batches
from fourstroke.testing.episodes import make_group, make_record
from fourstroke.types import PayloadReference, StopReason


def _algorithm(**terms):
    return AlgorithmConfig.model_validate({"name": "grpo", "advantage": "group_centred", **terms})


def _records():
    """Three groups of 2, 3 and 2 scored members; lengths 1 to 7."""
    return [
        make_record(make_group([1.0, 0.0], index=0, reply_lengths=[1, 2])),
        make_record(make_group([1.0, None, 0.0, 0.0], index=1, reply_lengths=[3, 9, 4, 5])),
        make_record(make_group([1.0, 1.0], index=2, reply_lengths=[6, 7])),
    ]


def _build(records, *, step=3, max_tokens=10, **terms):
    return build_batches(records, step=step, algorithm=_algorithm(**terms), max_tokens=max_tokens)


def test_rows_are_those_of_the_scored_members_with_their_groups_advantages():
    (batch,) = _build(_records())

    assert [row.id for row in batch.rows] == [
        "e0000-i000000.0/0",
        "e0000-i000000.1/0",
        "e0000-i000001.0/0",
        "e0000-i000001.2/0",
        "e0000-i000001.3/0",
        "e0000-i000002.0/0",
        "e0000-i000002.1/0",
    ]
    advantages = [row.advantage for row in batch.rows]
    assert advantages == pytest.approx([0.5, -0.5, 2 / 3, -1 / 3, -1 / 3, 0.0, 0.0])
    assert [(row.num_tokens, row.num_loss_tokens) for row in batch.rows] == [
        (2 + length, length) for length in (1, 2, 3, 4, 5, 6, 7)
    ]


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [1 / 28] * 7),  # 1 + 2 + ... + 7; rows without gradient are in it
        ("sequence_mean", [1 / (7 * length) for length in range(1, 8)]),
        ("sequence_sum", [1 / 7] * 7),
        ("constant", [1 / (7 * 10)] * 7),
    ],
)
def test_weights_have_the_denominators_of_the_whole_update(aggregation, weights):
    (batch,) = _build(_records(), aggregation=aggregation)

    assert [row.weight for row in batch.rows] == pytest.approx(weights)
    assert (batch.num_sequences, batch.num_loss_tokens) == (7, 28)


def test_each_update_has_groups_and_denominators_of_its_own():
    first, second = _build(_records(), updates_per_step=2)

    assert (first.step, first.update, second.step, second.update) == (3, 0, 3, 1)
    assert {row.group for row in first.rows} == {"e0000-i000000"}
    assert {row.group for row in second.rows} == {"e0000-i000001", "e0000-i000002"}
    assert {row.weight for row in first.rows} == {1 / 3}
    assert {row.weight for row in second.rows} == {1 / 25}
    assert (first.num_loss_tokens, second.num_loss_tokens) == (3, 25)
    assert (first.needs_proximal, second.needs_proximal) == (True, True)


def test_a_single_update_needs_no_proximal_logprobs():
    (batch,) = _build(_records())

    assert not batch.needs_proximal


def test_there_are_no_more_updates_than_groups():
    batches = _build(_records(), updates_per_step=8)

    assert [len({row.group for row in batch.rows}) for batch in batches] == [1, 1, 1]


@pytest.mark.parametrize("num_updates", range(1, 8))
def test_every_group_is_in_one_update_in_order(num_updates):
    records = [make_record(make_group([1.0, 0.0], index=index)) for index in range(7)]

    batches = _build(records, updates_per_step=num_updates)

    assert [key for batch in batches for key in batch.references] == [record.id for record in records]
    assert {len(batch.references) for batch in batches} <= {7 // num_updates, -(-7 // num_updates)}


def test_references_lead_to_the_groups():
    at = PayloadReference(segment=1, offset=2, length=3, digest="f" * 16)
    record = make_record(make_group([1.0, 0.0], index=4), reference=at)

    (batch,) = _build([record])

    assert batch.references == {"e0000-i000004": at}


def test_a_step_is_the_population_of_a_batch_wide_scale_whatever_its_updates():
    batches = _build(_records(), advantage="batch_standardised", updates_per_step=3)

    # Scores 1, 0 | 1, 0, 0 | 1, 1: mean 4/7, deviation sqrt(12)/7.
    advantages = [row.advantage for batch in batches for row in batch.rows]
    right, wrong = 3 / 12**0.5, -4 / 12**0.5
    assert advantages == pytest.approx([right, wrong, right, wrong, wrong, right, right])


def test_lengths_weigh_the_baseline():
    (batch,) = _build(_records()[:1], advantage="length_weighted_baseline")

    assert [row.advantage for row in batch.rows] == pytest.approx([2 / 3, -1 / 3])  # (1 * 1 + 2 * 0) / 3


def test_a_reply_near_the_limit_loses_of_its_score():
    record = make_record(make_group([1.0, 1.0, 1.0], reply_lengths=[6, 9, 10]))

    (batch,) = _build([record], overlong_share=0.2)

    assert [row.advantage for row in batch.rows] == pytest.approx([0.5, 0.0, -0.5])  # scores 1, 0.5 and 0


def test_a_cut_reply_is_in_the_baseline_and_in_nothing_else():
    whole = make_group([1.0, 0.0, 0.0], reply_lengths=[2, 3, 10])
    cut = msgspec.structs.replace(
        whole.members[2], episode=msgspec.structs.replace(whole.members[2].episode, stop=StopReason.LENGTH)
    )
    record = make_record(msgspec.structs.replace(whole, members=(*whole.members[:2], cut)))

    (batch,) = _build([record], mask_truncated=True, aggregation="sequence_mean")

    assert [(row.member, row.advantage) for row in batch.rows] == [
        (0, pytest.approx(2 / 3)),
        (1, pytest.approx(-1 / 3)),
    ]
    assert (batch.num_sequences, batch.num_loss_tokens) == (2, 5)
    assert [row.weight for row in batch.rows] == pytest.approx([1 / 4, 1 / 6])


def test_a_step_of_cut_replies_alone_has_no_row():
    group = make_group([1.0, 0.0])
    members = tuple(
        msgspec.structs.replace(member, episode=msgspec.structs.replace(member.episode, stop=StopReason.LENGTH))
        for member in group.members
    )

    (batch,) = _build([make_record(msgspec.structs.replace(group, members=members))], mask_truncated=True)

    assert (batch.rows, batch.num_loss_tokens) == ((), 0)
    assert list(batch.references) == [group.id]


def _with_components(group, components):
    members = tuple(
        msgspec.structs.replace(member, verdict=msgspec.structs.replace(member.verdict, components=parts))
        for member, parts in zip(group.members, components, strict=True)
    )
    return make_record(msgspec.structs.replace(group, members=members))


def test_components_are_normalised_apart_by_name():
    # p is right or not and never short, q right and short or neither; names come in any order.
    p = _with_components(make_group([1.0, 0.0]), [{"right": 1.0, "short": 0.0}, {"short": 0.0, "right": 0.0}])
    q = _with_components(make_group([2.0, 0.0], index=1), [{"short": 1.0, "right": 1.0}, {"right": 0.0, "short": 0.0}])

    (batch,) = _build([p, q], advantage="decoupled")

    assert [row.advantage for row in batch.rows] == pytest.approx([x / 2.5**0.5 for x in (1, -1, 2, -2)])


@pytest.mark.parametrize("other", [{}, {"right": 0.0}, {"right": 0.0, "long": 0.0}])
def test_scores_without_the_same_components_cannot_be_compared(other):
    record = _with_components(make_group([1.0, 0.0]), [{"right": 1.0, "short": 0.0}, other])

    with pytest.raises(DataError, match=r"episode e0000-i000000\.[01] has the score's components .* have the grader"):
        _build([record], advantage="decoupled")
