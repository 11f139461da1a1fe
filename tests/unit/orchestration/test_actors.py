"""What runs inside actors: rows read out of the store by hand, and errors that cross as a name and a sentence."""

import asyncio

import msgspec
import numpy as np
import pytest

from fourstroke.config import AlgorithmConfig
from fourstroke.errors import ActorFailedError, DataError, RunFolderError
from fourstroke.orchestration.actors import _answered, _answered_async, read_rows, split_answers, unpack
from fourstroke.orchestration.batching import build_batches
from fourstroke.store import PayloadWriter
from fourstroke.testing.episodes import make_episode, make_group, make_record, prompt_span, sampled_span
from fourstroke.types import Column, RowShape, SampleRequest


def _stored(folder, *groups):
    writer = PayloadWriter(folder)
    records = [make_record(group, reference=writer.append(group)) for group in groups]
    writer.close()
    return records


def _batch(records):
    algorithm = AlgorithmConfig.model_validate({"name": "grpo", "advantage": "group_centred"})
    (batch,) = build_batches(records, step=1, algorithm=algorithm, max_tokens=8)
    return batch


def test_rows_are_the_stored_tokens_with_the_two_numbers_of_their_records(tmp_path):
    groups = make_group([1.0, None, 0.0], index=0, version=3), make_group([0.0, 1.0], index=1, reply_lengths=[1, 2])

    rows = read_rows(_batch(_stored(tmp_path, *groups)), tmp_path)

    assert [row.id for row in rows] == [
        "e0000-i000000.0/0",
        "e0000-i000000.2/0",
        "e0000-i000001.0/0",
        "e0000-i000001.1/0",
    ]
    assert [row[Column.IDS].tolist() for row in rows] == [
        [1, 2, 10, 10, 10],
        [1, 2, 12, 12, 12],
        [1, 2, 10],
        [1, 2, 11, 11],
    ]
    assert rows[0][Column.LOSS_MASK].tolist() == [False, False, True, True, True]
    assert rows[0][Column.VERSIONS].tolist() == [-1, -1, 3, 3, 3]
    assert rows[0][Column.BEHAVIOUR_LOGPROBS].tolist() == [0, 0, -1, -1, -1]
    assert [row[Column.ADVANTAGES].tolist() for row in rows] == [
        [0, 0, 0.5, 0.5, 0.5],
        [0, 0, -0.5, -0.5, -0.5],
        [0, 0, -0.5],
        [0, 0, 0.5, 0.5],
    ]
    ninth = float(np.float32(1 / 9))  # 3 + 3 + 1 + 2 loss tokens
    assert rows[3][Column.WEIGHT].tolist() == [0, 0, ninth, ninth]
    assert {rows[0][column].dtype.name for column in (Column.ADVANTAGES, Column.WEIGHT)} == {"float32"}


def test_each_row_of_an_episode_that_forks_is_found_by_its_number(tmp_path):
    spans = [prompt_span([1, 2]), sampled_span([5], [-1.0], parent=0), sampled_span([6, 7], [-1.0] * 2, parent=0)]
    plain = make_group([1.0, 0.0])
    forked = msgspec.structs.replace(plain.members[0], episode=make_episode(spans))
    writer = PayloadWriter(tmp_path)
    reference = writer.append(msgspec.structs.replace(plain, members=(forked, plain.members[1])))
    writer.close()
    record = make_record(plain, reference=reference)
    shapes = (
        RowShape(num_tokens=3, num_loss_tokens=1, num_shared_tokens=0),
        RowShape(num_tokens=4, num_loss_tokens=2, num_shared_tokens=2),
    )
    episodes = (msgspec.structs.replace(record.episodes[0], rows=shapes), record.episodes[1])

    rows = read_rows(_batch([msgspec.structs.replace(record, episodes=episodes)]), tmp_path)

    assert [(row.id, row[Column.IDS].tolist()) for row in rows] == [
        ("e0000-i000000.0/0", [1, 2, 5]),
        ("e0000-i000000.0/1", [1, 2, 6, 7]),
        ("e0000-i000000.1/0", [1, 2, 11, 11, 11]),
    ]


@pytest.mark.parametrize("field", ["num_tokens", "num_loss_tokens"])
def test_a_row_that_is_not_the_recorded_one_is_refused_by_its_id(tmp_path, field):
    batch = _batch(_stored(tmp_path, make_group([1.0, 0.0])))
    wrong = msgspec.structs.replace(batch.rows[1], **{field: 4})

    with pytest.raises(DataError, match=r"row e0000-i000000\.1/0 has 5 tokens, 3 of them in the loss; its record says"):
        read_rows(msgspec.structs.replace(batch, rows=(batch.rows[0], wrong)), tmp_path)


def test_a_damaged_segment_is_refused(tmp_path):
    batch = _batch(_stored(tmp_path, make_group([1.0, 0.0])))
    segment = tmp_path / "segment-00000.bin"
    segment.write_bytes(segment.read_bytes()[:-1])

    with pytest.raises(RunFolderError, match="segment 0 is damaged"):
        read_rows(batch, tmp_path)


# --- answers --------------------------------------------------------------------------------------------------------


class Part:
    """Stands for an actor."""

    @_answered
    def plain(self, error=None):
        """Answers, or raises what it is given."""
        if error is not None:
            raise error
        return [b"done"]

    @_answered_async
    async def waiting(self, error=None):
        """The same."""
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return [b"done"]


def _call(verb, *arguments):
    answer = getattr(Part(), verb)(*arguments)
    return unpack(asyncio.run(answer) if verb == "waiting" else answer)


@pytest.mark.parametrize("verb", ["plain", "waiting"])
def test_an_answer_is_bytes(verb):
    assert _call(verb) == [b"done"]


@pytest.mark.parametrize("verb", ["plain", "waiting"])
def test_an_error_of_our_tree_comes_back_as_itself_without_a_pickle(verb, capfd):
    with pytest.raises(DataError, match=r"^row 3 is empty$") as caught:
        _call(verb, DataError("row 3 is empty"))

    assert type(caught.value) is DataError
    assert "row 3 is empty" in capfd.readouterr().err  # with its traceback, in the log of its process


@pytest.mark.parametrize("verb", ["plain", "waiting"])
def test_another_error_comes_back_with_the_verb_that_it_crossed(verb):
    with pytest.raises(ActorFailedError, match=f"^{verb}: ZeroDivisionError: division by zero$"):
        _call(verb, ZeroDivisionError("division by zero"))


@pytest.mark.parametrize("name", [b"NoSuchError", b"boundary", b"Iterator", b"annotations"])
def test_a_name_that_is_no_error_of_ours_is_an_actors_failure(name):
    with pytest.raises(ActorFailedError, match="what it said"):
        unpack(("error", [name, b"what it said"]))


def test_cancellation_is_no_answer():
    async def scenario():
        waiting = asyncio.ensure_future(Part().waiting())
        await asyncio.sleep(0)
        waiting.cancel()
        await waiting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())


def test_answers_together_are_told_apart_by_the_numbers_of_samples():
    def request(num_samples):
        return SampleRequest(
            id="g",
            prompt_ids=np.array([1], np.int32),
            num_samples=num_samples,
            max_tokens=1,
            temperature=1.0,
            stop_ids=(),
            seed=0,
        )

    parts = [b"a", b"b", b"c", b"d"]

    assert list(split_answers(parts, [request(1), request(3)])) == [[b"a"], [b"b", b"c", b"d"]]
