"""The model that is trained: fp32 master weights, and a copy in the compute type that runs forward and backward.

The one file that touches Hugging Face internals. It knows token ids and log-probabilities, and no batch, loss or
optimiser.

    masters (fp32) --refresh--> working model (bf16) --backward--> gradients (bf16, one parameter at a time)
       ^                                                              | added in fp32 at once
       optimiser <---------------- masters' gradients (fp32) <--------'

With compute type float32 the working model is the master, and there is no copy.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from fourstroke.errors import ConfigError, ModelNotFoundError, RunFolderError
from fourstroke.trainer import attention
from fourstroke.trainer.attention import layout_of
from fourstroke.trainer.head import add_to, token_logprobs
from fourstroke.trainer.packing import Packed, assemble

_STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


class PolicyModel:
    """A causal language model in training.

    Attributes:
        masters: The fp32 parameters that the optimiser changes, by checkpoint name; tied ones appear once. Each has a
            gradient from the start, zero until a backward pass adds to it.
        stored_dtypes: Every tensor of the checkpoint by name, with the type that it has there. Exactly these names are
            published and saved: a tied output matrix only if the checkpoint holds it.
    """

    masters: dict[str, nn.Parameter]
    stored_dtypes: dict[str, torch.dtype]

    def __init__(self, working: nn.Module, path: Path, *, stored_dtypes: Mapping[str, torch.dtype]) -> None:
        """Use :meth:`load`."""
        self._working: Any = working
        self._path = path
        self.stored_dtypes = dict(stored_dtypes)
        self._tensors = _named_tensors(working)
        self._check_names()
        self.masters = self._make_masters()
        self._begin_packing()
        self._check_head()

    @classmethod
    def load(cls, path: Path, *, compute_dtype: torch.dtype, device: torch.device) -> Self:
        """Load a folder in Hugging Face format. Dropout is off: log-probabilities are functions of weights and ids.

        Args:
            path: Folder with ``config.json`` and safetensors.
            compute_dtype: Type of the forward and backward pass.
            device: Where the model lies.

        Raises:
            ModelNotFoundError: The folder holds no safetensors, or lacks a tensor that the model has.
            ConfigError: The model's structure is one that we cannot train faithfully; the text says which part.
        """
        stored_dtypes = {
            name: _stored_dtype(name, file.get_slice(name).get_dtype()) for name, file in _stored_tensors(path)
        }
        transformers_logging.disable_progress_bar()
        working: Any = AutoModelForCausalLM.from_pretrained(path, dtype=compute_dtype, local_files_only=True)
        working.to(device).eval()
        for parameter in working.parameters():
            # Transformers gives views of the mapped file, at whatever alignment its header leads to. Kernels may give
            # other bits at another alignment, and whoever shortens the file would end this process.
            parameter.data = parameter.data.clone()
        return cls(working, path, stored_dtypes=stored_dtypes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the checkpoint, in the order of :meth:`tensors`."""
        return {name: tuple(self._tensors[name].shape) for name in sorted(self.stored_dtypes)}

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next(iter(self.masters.values())).device

    @property
    def vocab_size(self) -> int:
        """Ids that it has an embedding for."""
        return int(self._working.get_input_embeddings().num_embeddings)

    def token_logprobs(
        self, packed: Packed, sources_N: np.ndarray, targets_N: np.ndarray, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of tokens, each given the tokens before it in its row.

        Args:
            packed: The rows of a micro-batch.
            sources_N: int64, the packed tokens that predict; only they pass through the output matrix.
            targets_N: int64, the token ids that follow them.
            temperature: Sampling temperature.

        Returns:
            Log-probabilities [N] and entropies [N], both with gradient, float32 or wider.
        """
        sources, targets = (torch.from_numpy(values).to(self.device) for values in (sources_N, targets_N))
        hidden_TH = self.hidden(packed)
        # Taken up in fp32: the last token of a prompt predicts the first one of each reply, and their gradients add.
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        return token_logprobs(
            hidden_TH.to(wide).index_select(0, sources).to(hidden_TH.dtype),
            self._working.get_output_embeddings().weight,
            targets,
            temperature=temperature,
        )

    def hidden(self, packed: Packed) -> Tensor:
        """Last hidden states [T, H] of a packed micro-batch."""
        hidden_TH: Tensor = self._working.base_model(**self._inputs(packed)).last_hidden_state[0]
        return hidden_TH

    def _inputs(self, packed: Packed) -> dict[str, Any]:
        ids_T, positions_T = (torch.from_numpy(values).to(self.device) for values in (packed.ids_T, packed.positions_T))
        return {
            "input_ids": ids_T[None],
            "position_ids": positions_T[None],
            "use_cache": False,
            "layout": layout_of(packed.segments, device=self.device),
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the working model, after the optimiser has changed them."""
        for name, master in self.masters.items():
            if self._tensors[name] is not master:
                self._tensors[name].copy_(master)

    def tensors(self, dtype_of: Callable[[str], torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the checkpoint under its name, detached, in the type that ``dtype_of`` gives for the name.

        The order is that of the names. Values are rounded from the fp32 masters once.
        """
        for name in sorted(self.stored_dtypes):
            working = self._tensors[name].detach()
            dtype = dtype_of(name)
            # The working copy is the master rounded to its type, so where the type is right no second copy is made.
            yield name, working if working.dtype == dtype else self._exact(name).detach().to(dtype)

    def export(self, folder: Path) -> None:
        """Write the model in Hugging Face format, in the checkpoint's own types, whole or not at all.

        The files that are not weights (configuration, generation settings, tokenizer, licence) are the checkpoint's.

        Raises:
            RunFolderError: ``folder`` exists.
        """
        if folder.exists():
            raise RunFolderError(f"{folder} exists and an exported model is never written over; name another folder")
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for source in sorted(self._path.iterdir()):
            if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(source, partial / source.name)
        tensors = {
            name: tensor.to("cpu", memory_format=torch.contiguous_format)
            for name, tensor in self.tensors(self.stored_dtypes.__getitem__)
        }
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        partial.replace(folder)

    def _exact(self, name: str) -> Tensor:
        """The fp32 master under any of its names, or the tensor itself where it is not trained."""
        return self._master_of.get(id(self._tensors[name]), self._tensors[name])

    def _check_names(self) -> None:
        strange = sorted(self.stored_dtypes.keys() - self._tensors.keys())
        if strange:
            raise ConfigError(
                f"model.name = {self._path}: its checkpoint holds {strange[0]!r}, which transformers loads under "
                "another name or not at all, so that it could not be published; choose another model"
            )
        stored = {id(self._tensors[name]) for name in self.stored_dtypes}
        for name, tensor in self._tensors.items():
            if id(tensor) not in stored:
                raise ModelNotFoundError(f"{self._path} lacks the tensor {name!r}; get the model again")

    def _make_masters(self) -> dict[str, nn.Parameter]:
        masters: dict[str, nn.Parameter] = {}
        self._master_of: dict[int, nn.Parameter] = {}
        for name, file in _stored_tensors(self._path):
            working = self._tensors[name]
            if not isinstance(working, nn.Parameter) or id(working) in self._master_of:
                continue
            if working.dtype in (torch.float32, torch.float64):
                master = working
            else:
                master = nn.Parameter(file.get_tensor(name).to(working.device, torch.float32, copy=True))
                working.register_post_accumulate_grad_hook(_move_gradient_to(master))  # type: ignore[no-untyped-call]
            master.grad = torch.zeros_like(master)
            masters[name] = self._master_of[id(working)] = master
        return masters

    @torch.no_grad()
    def _begin_packing(self) -> None:
        """From here on attention is that over packed rows; proved on two rows that share half of their tokens."""
        ids = np.linspace(0, self.vocab_size - 1, 14).astype(np.int64)[1:-1]
        rows = [ids[:8], ids[[0, 1, 2, 3, 8, 9, 10, 11]]]
        ids_BT = torch.from_numpy(np.stack(rows)).to(self.device)
        expected_TH = self._working.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state.flatten(0, 1)
        self._working.set_attn_implementation(attention.NAME)
        packed = assemble(rows)
        try:
            found_TH = self.hidden(packed)[np.concatenate(packed.slots)]
        except ConfigError as error:
            raise ConfigError(f"model.name = {self._path}: {error}") from error
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"model.name = {self._path}: its layers do not take packed rows ({error}); choose another model"
            ) from error
        # bfloat16 makes some tokens differ much, most of them by a hundredth; a token that sees another row differs by
        # about its own size.
        differences_T = (found_TH - expected_TH).float().norm(dim=-1) / expected_TH.float().norm(dim=-1)
        difference = max(float(part.median()) for part in differences_T.split(4))
        if not difference < 0.25:
            raise ConfigError(
                f"model.name = {self._path}: packed rows differ by {difference:.0%} from plain ones, so its layers mix "
                "what must not see each other; choose another model"
            )

    @torch.no_grad()
    def _check_head(self) -> None:
        """Prove on four tokens that the logits are the output matrix times the last hidden state, and nothing more."""
        packed = assemble([np.arange(1, 5)])
        expected_TV = self._working(**self._inputs(packed)).logits[0].float()
        found_TV = (self.hidden(packed) @ self._working.get_output_embeddings().weight.T).float()
        if not torch.allclose(found_TV, expected_TV, rtol=1e-2, atol=1e-2):
            raise ConfigError(
                f"model.name = {self._path}: its logits are not its output matrix times its last hidden state (a bias, "
                "a scale or a soft cap comes after), which the trainer does not compute; choose another model"
            )


def _move_gradient_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move(working: Tensor) -> None:
        assert working.grad is not None
        assert master.grad is not None
        add_to(master.grad, working.grad)
        working.grad = None

    return move


def _named_tensors(working: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied parameter under each of its names, as one object."""
    return {
        name: tensor
        for name, tensor in working.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
    }


def _stored_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Names of a checkpoint's tensors, each with the open file that holds it."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"{path} holds no .safetensors file; convert the model to safetensors")
    for file_path in files:
        with safe_open(file_path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file


def _stored_dtype(name: str, stored: str) -> torch.dtype:
    if stored not in _STORED_DTYPES:
        raise ConfigError(f"tensor {name!r} is stored as {stored}; choose a checkpoint that is not quantised")
    return _STORED_DTYPES[stored]
