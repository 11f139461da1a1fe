"""Both ends of the weight protocol: what goes in comes out, and every fault stops with its own sentence."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourstroke.errors import ModelNotFoundError, PublicationError
from fourstroke.types import Publication, TensorEntry, WeightVersion, decode, encode
from fourstroke.weights.manifest import checkpoint_shapes, version_digest
from fourstroke.weights.publish import Publisher, TensorSpec
from fourstroke.weights.receive import Receiver

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (7, 5),
    "layer.up": (3, 3),
    "layer.down": (3, 3),
    "norm": (5,),
    "scale": (),
}
START = WeightVersion(incarnation=0, number=0, digest="checkpoint")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_publisher(path: Path, *, dtype: str = "bfloat16") -> Publisher:
    specs = [TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in SHAPES.items()]
    return Publisher(path, entries=specs)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = make_publisher(tmp_path / "weights")
    yield made
    made.close()


@pytest.fixture
def receiver() -> Receiver:
    return Receiver(SHAPES, dtype="bfloat16")


def changed(publication: Publication, name: str, /, **fields: object) -> Publication:
    """The publication with one entry changed and the digest of the version made to agree."""
    entries = tuple(
        msgspec.structs.replace(entry, **fields) if entry.name == name else entry for entry in publication.tensors
    )
    return with_entries(publication, entries)


def with_entries(publication: Publication, entries: tuple[TensorEntry, ...]) -> Publication:
    version = msgspec.structs.replace(publication.version, digest=version_digest(entries))
    return msgspec.structs.replace(publication, tensors=entries, version=version)


def flip(publication: Publication, *, at: int, data: bytes) -> None:
    with Path(publication.path).open("r+b") as file:
        file.seek(at)
        file.write(data)


def entry_of(publication: Publication, name: str) -> TensorEntry:
    (entry,) = (entry for entry in publication.tensors if entry.name == name)
    return entry


# --- what arrives -----------------------------------------------------------------------------------------------------


def test_every_tensor_arrives_rounded_once(publisher: Publisher, receiver: Receiver) -> None:
    source = tensors(1)

    publication = publisher.publish(1, source.items(), incarnation=0)
    arrived = dict(receiver.receive(decode(encode(publication), Publication), held=START))

    assert arrived.keys() == source.keys()
    for name, tensor in source.items():
        assert arrived[name].dtype == torch.bfloat16
        assert torch.equal(arrived[name], tensor.bfloat16())


def test_versions_follow_one_another_in_one_mapping(publisher: Publisher, receiver: Receiver) -> None:
    first = publisher.publish(1, tensors(1).items(), incarnation=0)
    before = dict(receiver.receive(first, held=START))
    second = publisher.publish(2, tensors(2).items(), incarnation=0)
    after = dict(receiver.receive(second, held=first.version))

    assert first.path == second.path
    assert first.version.digest != second.version.digest
    # One mapping: the views handed over first now show the second publication.
    assert before["embed"].data_ptr() == after["embed"].data_ptr()
    assert torch.equal(after["embed"], tensors(2)["embed"].bfloat16())


def test_elements_whose_published_bits_differ_are_counted(publisher: Publisher) -> None:
    ones = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    nudged = {**ones, "embed": ones["embed"] + 1e-5, "norm": ones["norm"].clone()}
    nudged["norm"][:2] = torch.tensor([2.0, torch.nan])

    changed = [
        {entry.name: entry.num_changed for entry in publisher.publish(number, source.items(), incarnation=0).tensors}
        for number, source in enumerate((ones, nudged, nudged), start=1)
    ]

    assert changed[0] == {name: math.prod(shape) for name, shape in SHAPES.items()}
    # One part in 100,000 is nothing in bfloat16, and a NaN is the same one the second time.
    assert changed[1] == dict.fromkeys(SHAPES, 0) | {"norm": 2}
    assert changed[2] == dict.fromkeys(SHAPES, 0)


def test_the_digest_depends_on_content_and_not_on_order(publisher: Publisher) -> None:
    source = tensors(1)
    forwards = publisher.publish(1, source.items(), incarnation=0).version.digest
    backwards = publisher.publish(2, reversed(list(source.items())), incarnation=0).version.digest
    nudged = publisher.publish(3, {**source, "norm": source["norm"] + 1}.items(), incarnation=0).version.digest

    assert forwards == backwards
    assert forwards != nudged


def test_a_value_that_bf16_cannot_tell_apart_is_the_same_version(publisher: Publisher) -> None:
    ones = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    above = {name: tensor + 1e-5 for name, tensor in ones.items()}

    assert (
        publisher.publish(1, ones.items(), incarnation=0).version.digest
        == publisher.publish(2, above.items(), incarnation=0).version.digest
    )


def test_a_transposed_view_arrives_as_it_reads(publisher: Publisher, receiver: Receiver) -> None:
    source = tensors(1)
    source["layer.up"] = source["layer.up"].T

    arrived = dict(receiver.receive(publisher.publish(1, source.items(), incarnation=0), held=START))

    assert torch.equal(arrived["layer.up"], source["layer.up"].bfloat16())


def test_the_receiver_cannot_change_what_was_published(publisher: Publisher, receiver: Receiver) -> None:
    publication = publisher.publish(1, tensors(1).items(), incarnation=0)
    before = Path(publication.path).read_bytes()

    dict(receiver.receive(publication, held=START))["embed"].zero_()

    assert Path(publication.path).read_bytes() == before


# --- the writing end refuses ----------------------------------------------------------------------------------------


def without(name: str) -> list[tuple[str, torch.Tensor]]:
    return [(key, tensor) for key, tensor in tensors(1).items() if key != name]


@pytest.mark.parametrize(
    ("given_tensors", "sentence"),
    [
        (without("norm"), "tensor norm is missing"),
        ([*tensors(1).items(), ("bias", torch.ones(2))], "tensor bias is unknown"),
        ([*tensors(1).items(), ("norm", torch.ones(5))], "tensor norm is given twice"),
        ([*without("norm"), ("norm", torch.ones(6))], r"tensor norm has shape \(6,\), declared was \(5,\)"),
    ],
)
def test_a_wrong_set_of_tensors_is_not_published(
    publisher: Publisher, given_tensors: list[tuple[str, torch.Tensor]], sentence: str
) -> None:
    with pytest.raises(PublicationError, match=sentence):
        publisher.publish(1, given_tensors, incarnation=0)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    spec = TensorSpec(name="norm", dtype="bfloat16", shape=(5,))
    with pytest.raises(PublicationError, match="2 tensors are to be published under 1 names"):
        Publisher(tmp_path / "weights", entries=[spec, spec])


def test_a_file_that_is_there_is_not_written_over(publisher: Publisher, tmp_path: Path) -> None:
    with pytest.raises(PublicationError, match="cannot be made"):
        make_publisher(tmp_path / "weights")
    assert publisher.publish(1, tensors(1).items(), incarnation=0).version.number == 1


def test_a_full_disk_is_found_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    spec = TensorSpec(name="vast", dtype="float32", shape=(2**50,))
    with pytest.raises(PublicationError, match=r"cannot hold the \d+ bytes"):
        Publisher(tmp_path / "weights", entries=[spec])
    assert list(tmp_path.iterdir()) == []


def test_close_unlinks_and_ends(publisher: Publisher, tmp_path: Path) -> None:
    publisher.close()
    publisher.close()

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PublicationError, match="was closed"):
        publisher.publish(1, tensors(1).items(), incarnation=0)


# --- faults on the way ----------------------------------------------------------------------------------------------


def skip_copy_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that does everything for one tensor but the copy."""
    copy = Publisher._copy

    def faulty(self: Publisher, offset: int, *, source: torch.Tensor) -> None:
        if offset != self._offsets[name]:
            copy(self, offset, source=source)

    monkeypatch.setattr(Publisher, "_copy", faulty)


def test_stale_bytes_of_one_tensor(publisher: Publisher, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    first = publisher.publish(1, tensors(1).items(), incarnation=0)
    skip_copy_of("layer.up", monkeypatch)
    second = publisher.publish(2, tensors(2).items(), incarnation=0)

    with pytest.raises(PublicationError, match=r"publication 2: tensor layer\.up arrived with digest"):
        receiver.receive(second, held=first.version)


def test_bytes_of_two_tensors_swapped(publisher: Publisher, receiver: Receiver) -> None:
    publication = publisher.publish(1, tensors(1).items(), incarnation=0)
    up, down = entry_of(publication, "layer.up"), entry_of(publication, "layer.down")
    whole = Path(publication.path).read_bytes()
    flip(publication, at=up.offset, data=whole[down.offset : down.offset + down.size_bytes])
    flip(publication, at=down.offset, data=whole[up.offset : up.offset + up.size_bytes])

    with pytest.raises(PublicationError, match=r"tensor layer\.(up|down) arrived with digest"):
        receiver.receive(publication, held=START)


def test_places_of_two_tensors_swapped_in_the_manifest(publisher: Publisher, receiver: Receiver) -> None:
    publication = publisher.publish(1, tensors(1).items(), incarnation=0)
    up, down = entry_of(publication, "layer.up"), entry_of(publication, "layer.down")
    swapped = changed(changed(publication, "layer.up", offset=down.offset), "layer.down", offset=up.offset)

    with pytest.raises(PublicationError, match=r"tensor layer\.(up|down) arrived with digest"):
        receiver.receive(swapped, held=START)


def test_names_of_two_tensors_swapped(publisher: Publisher, receiver: Receiver) -> None:
    publication = publisher.publish(1, tensors(1).items(), incarnation=0)
    other = {"layer.up": "layer.down", "layer.down": "layer.up"}
    entries = tuple(msgspec.structs.replace(e, name=other.get(e.name, e.name)) for e in publication.tensors)

    with pytest.raises(PublicationError, match=r"tensor layer\.(up|down) arrived with digest"):
        receiver.receive(with_entries(publication, entries), held=START)


def test_half_written(publisher: Publisher, receiver: Receiver) -> None:
    publication = publisher.publish(1, tensors(1).items(), incarnation=0)
    entry = entry_of(publication, "embed")
    half = entry.size_bytes // 2
    flip(publication, at=entry.offset + half, data=bytes(entry.size_bytes - half))

    with pytest.raises(PublicationError, match="tensor embed arrived with digest"):
        receiver.receive(publication, held=START)


def test_a_file_that_is_cut_short(publisher: Publisher, receiver: Receiver) -> None:
    publication = publisher.publish(1, tensors(1).items(), incarnation=0)
    half = publication.size_bytes // 2
    with Path(publication.path).open("r+b") as file:
        file.truncate(half)

    with pytest.raises(PublicationError, match=f"has {half} of its {publication.size_bytes} bytes"):
        receiver.receive(publication, held=START)


def test_a_file_that_is_gone(publisher: Publisher, receiver: Receiver) -> None:
    publication = publisher.publish(1, tensors(1).items(), incarnation=0)
    publisher.close()

    with pytest.raises(PublicationError, match="cannot be read"):
        receiver.receive(publication, held=START)


def test_a_file_of_the_same_name_made_anew_is_mapped_anew(tmp_path: Path, receiver: Receiver) -> None:
    first = make_publisher(tmp_path / "weights")
    dict(receiver.receive(first.publish(1, tensors(1).items(), incarnation=0), held=START))
    first.close()
    second = make_publisher(tmp_path / "weights")

    arrived = dict(receiver.receive(second.publish(1, tensors(2).items(), incarnation=1), held=START))

    assert torch.equal(arrived["embed"], tensors(2)["embed"].bfloat16())
    second.close()


def dropped(publication: Publication) -> Publication:
    return with_entries(publication, tuple(e for e in publication.tensors if e.name != "norm"))


def doubled(publication: Publication) -> Publication:
    return with_entries(publication, (*publication.tensors, entry_of(publication, "norm")))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (dropped, "tensor norm is missing"),
        (doubled, "tensor norm is there twice"),
        (lambda p: changed(p, "norm", name="norm.weight"), r"tensor norm is missing \(and 1 more\)"),
        (lambda p: changed(p, "norm", shape=(5, 1)), r"tensor norm has shape \(5, 1\), this model has \(5,\)"),
        (lambda p: changed(p, "norm", dtype="float32"), "tensor norm has type float32, this engine takes bfloat16"),
        (lambda p: changed(p, "norm", size_bytes=8), "tensor norm has 8 bytes, its shape and type make 10"),
        (lambda p: changed(p, "norm", offset=-2), "tensor norm cannot lie at byte -2"),
        (lambda p: changed(p, "norm", offset=p.size_bytes - 8), "tensor norm cannot lie at byte"),
        (lambda p: changed(p, "norm", offset=1), "tensor norm cannot lie at byte 1 "),
        (lambda p: changed(p, "norm", digest="0" * 32), "tensor norm arrived with digest"),
        (
            lambda p: msgspec.structs.replace(p, version=msgspec.structs.replace(p.version, digest="0" * 32)),
            "its manifest has digest .*, its version says 0000",
        ),
    ],
)
def test_a_wrong_manifest(
    publisher: Publisher, receiver: Receiver, fault: Callable[[Publication], Publication], sentence: str
) -> None:
    publication = publisher.publish(1, tensors(1).items(), incarnation=0)

    with pytest.raises(PublicationError, match=sentence):
        receiver.receive(fault(publication), held=START)


@pytest.mark.parametrize(
    ("incarnation", "number", "held", "is_accepted"),
    [
        (0, 1, (0, 0), True),
        (0, 8, (0, 7), True),
        (0, 7, (0, 7), False),
        (0, 6, (0, 7), False),
        (0, 9, (0, 7), False),
        (1, 5, (0, 7), True),
        (1, 8, (0, 7), True),
        (0, 8, (1, 7), False),
        # A replacement, which holds the checkpoint alone, catches up with any.
        (0, 0, (-1, 0), True),
        (0, 7, (-1, 0), True),
        (3, 7, (-1, 0), True),
    ],
)
def test_the_order_of_versions(
    tmp_path: Path, receiver: Receiver, incarnation: int, number: int, held: tuple[int, int], is_accepted: bool
) -> None:
    publisher = make_publisher(tmp_path / "weights")
    publication = publisher.publish(number, tensors(1).items(), incarnation=incarnation)
    version = WeightVersion(incarnation=held[0], number=held[1], digest="held")

    if is_accepted:
        assert len(dict(receiver.receive(publication, held=version))) == len(SHAPES)
    else:
        with pytest.raises(PublicationError, match=f"publication {number} "):
            receiver.receive(publication, held=version)
    publisher.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_changed_byte_of_a_tensor_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    publisher = make_publisher(tmp_path_factory.mktemp("shm") / "weights")
    publication = publisher.publish(1, tensors(1).items(), incarnation=0)
    entry = data.draw(st.sampled_from(publication.tensors))
    position = data.draw(st.integers(0, entry.size_bytes - 1))
    mask = data.draw(st.integers(1, 255))
    old = Path(publication.path).read_bytes()[entry.offset + position]
    flip(publication, at=entry.offset + position, data=bytes([old ^ mask]))

    with pytest.raises(PublicationError, match=f"tensor {entry.name} arrived"):
        Receiver(SHAPES, dtype="bfloat16").receive(publication, held=START)
    publisher.close()


# --- checkpoints ----------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_shapes_of_one_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", SHAPES)

    assert checkpoint_shapes(tmp_path) == SHAPES


def test_shapes_of_shards(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"embed": (7, 5)})
    write_safetensors(tmp_path / "b.safetensors", {"norm": (5,)})
    index = {"weight_map": {"embed": "a.safetensors", "norm": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    assert checkpoint_shapes(tmp_path) == {"embed": (7, 5), "norm": (5,)}


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 8, struct.pack("<Q", 4) + b"oops"])
def test_no_checkpoint_or_a_damaged_one(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ModelNotFoundError, match="no whole checkpoint"):
        checkpoint_shapes(tmp_path)
