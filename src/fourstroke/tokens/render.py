"""Messages to token ids through the model's own chat template, and sampled ids to text for graders.

The one place that loads a tokenizer. Sampled ids are never encoded again: text made from them is evidence for graders
and readers, not something that training reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fourstroke.errors import DataError, ModelNotFoundError, boundary
from fourstroke.types import Message


class TokenRenderer(Protocol):
    """What a rollout needs of a tokenizer."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a reply."""
        ...

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 [T]: what the engine is fed, generation prompt included."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Text of sampled ids, without special tokens."""
        ...


class Renderer:
    """The tokenizer and chat template of a model's folder.

    Example:
        >>> Renderer(path).prompt_ids([Message(role="user", content="Hi")]).dtype  # doctest: +SKIP
        dtype('int32')
    """

    def __init__(self, model_path: Path) -> None:
        """Load the tokenizer of ``model_path``.

        Raises:
            ModelNotFoundError: The folder holds no tokenizer, or one without a chat template.
        """
        from transformers import AutoTokenizer  # heavy, and the command line must stay light

        with boundary(f"the tokenizer in {model_path} cannot be loaded", ModelNotFoundError):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path))
        if not self._tokenizer.chat_template:
            raise ModelNotFoundError(f"{model_path} has no chat template; use an instruction-tuned model")
        self._stop_ids = _stop_ids(model_path, self._tokenizer.eos_token_id)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids of the tokenizer and of the generation config, ascending."""
        return self._stop_ids

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 [T]: the messages in the model's template, with the header of the reply to come."""
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        ids = self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if not ids:
            raise DataError(f"the chat template renders {conversation!r} to no tokens; give the task a prompt")
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Text of sampled ids, special tokens left out, spaces untouched."""
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _stop_ids(model_path: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    found = set() if tokenizer_eos is None else {tokenizer_eos}
    generation_config = model_path / "generation_config.json"
    if generation_config.is_file():
        declared = json.loads(generation_config.read_text()).get("eos_token_id", [])
        found |= set(declared if isinstance(declared, list) else [declared])
    if not found:
        raise ModelNotFoundError(f"{model_path} declares no end-of-sequence token; add eos_token_id to its config")
    return tuple(sorted(found))
