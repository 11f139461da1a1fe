"""The codec: what goes in comes out; what is damaged, foreign or of another schema is refused."""

import typing

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fourstroke.errors import CodecError
from fourstroke.testing.episodes import make_group
from fourstroke.types import Batch, Column, Draw, Group, Trajectory, VersionRun, codec, decode, encode, nouns


@given(hnp.arrays(st.sampled_from([np.int32, np.float32, np.bool_, np.int8, np.float64]), hnp.array_shapes(min_dims=1)))
def test_arrays_come_back_bit_for_bit(array):
    flat = array.reshape(-1)
    row = Trajectory(id="r", group="g", episode="e", columns={Column.IDS: flat})

    back = decode(encode(row), Trajectory)[Column.IDS]

    assert back.dtype == flat.dtype
    assert back.tobytes() == flat.tobytes()
    assert back.flags.writeable


def test_a_group_with_its_union_of_verdicts_comes_back_equal():
    group = make_group([1.0, None, 0.0])

    back = decode(encode(group), Group)

    assert [type(m.verdict) for m in back.members] == [type(m.verdict) for m in group.members]
    assert encode(back) == encode(group)


def test_another_noun_is_refused():
    data = encode(VersionRun(version=1, num_tokens=2))
    with pytest.raises(CodecError, match="expected a Draw, the message holds a VersionRun"):
        decode(data, Draw)


def test_another_schema_is_refused():
    data = msgspec.msgpack.encode(["VersionRun", 99, {"version": 1, "num_tokens": 2}])
    with pytest.raises(CodecError, match="VersionRun has schema 99, this version reads schema 1"):
        decode(data, VersionRun)


def test_one_of_two_nouns_is_told_by_its_name():
    draw, run = Draw(epoch=0, index=1, task_id="t", seed=2), VersionRun(version=1, num_tokens=2)

    assert codec.decode_either(encode(draw), Draw, VersionRun) == draw
    assert codec.decode_either(encode(run), Draw, VersionRun) == run
    with pytest.raises(CodecError, match="expected a VersionRun, the message holds a Group"):
        codec.decode_either(encode(make_group([1.0])), Draw, VersionRun)
    with pytest.raises(CodecError, match="neither Draw nor VersionRun"):
        codec.decode_either(b"noise", Draw, VersionRun)


@given(st.binary(max_size=200))
def test_noise_is_refused_and_never_crashes(data):
    with pytest.raises(CodecError):
        decode(data, Group)


@given(st.integers(0, 400))
def test_a_cut_message_is_refused(num_bytes):
    data = encode(make_group([1.0, 0.0]))
    with pytest.raises(CodecError):
        decode(data[: min(num_bytes, len(data) - 1)], Group)


def test_an_array_of_objects_cannot_be_named():
    body = {"step": 0, "rows": [], "num_sequences": 0, "num_loss_tokens": 0}
    assert decode(msgspec.msgpack.encode(["Batch", 1, body]), Batch).step == 0
    columns = {"ids": ["object", [1], b"12345678"]}
    row = {"id": "r", "group": "g", "episode": "e", "columns": columns}
    with pytest.raises(CodecError):
        decode(msgspec.msgpack.encode(["Trajectory", 1, row]), Trajectory)


def test_each_noun_has_a_schema_number():
    defined = {
        value
        for value in vars(nouns).values()
        if isinstance(value, type) and issubclass(value, nouns.Noun) and value is not nouns.Noun
    }
    assert set(codec.SCHEMAS) == defined
    assert set(typing.get_args(nouns.Verdict)) <= defined


def test_columns_of_unequal_length_are_a_programmers_mistake():
    with pytest.raises(AssertionError):
        Trajectory(id="r", group="g", episode="e", columns={Column.IDS: np.zeros(2), Column.WEIGHT: np.zeros(3)})


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_is_finite(score):
    with pytest.raises(ValueError, match="score must be finite"):
        nouns.Scored(score=score, components={}, reason="", grader="g", cost_s=0.0)
