"""What a whole run on fakes needs beside engine and trainer, and a tiny model for tests with real parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fourstroke.types import Message


class FakeRenderer:
    """A tokenizer of single characters: a token's id is its code point, and 0 ends a reply."""

    stop_ids: tuple[int, ...] = (0,)

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 [T]: the characters of all messages."""
        return np.array([ord(char) for message in messages for char in message.content], dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The characters, without the stop token."""
        return "".join(chr(int(i)) for i in ids if i != 0)


class SilentReporter:
    """Keeps what a person would have been told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.records: list[Mapping[str, float]] = []
        self.notes: list[str] = []

    def phase(self, name: str, *, total: int) -> None:
        """Keep the phase's name."""
        assert total >= 0, (name, total)
        self.phases.append(name)

    def advance(self, done: int) -> None:
        """Nothing to keep."""

    def step(self, step: int, *, total: int, record: Mapping[str, float], eta_s: float | None) -> None:
        """Keep the record."""
        assert step <= total, (step, total, eta_s)
        self.records.append(record)

    def note(self, text: str) -> None:
        """Keep the text."""
        self.notes.append(text)

    def summary(self, lines: Sequence[tuple[str, str]]) -> None:
        """Keep the lines."""
        self.notes += [f"{name}: {value}" for name, value in lines]

    def close(self) -> None:
        """Nothing to give back."""


def tiny_model(folder: Path) -> Path:
    """A folder with a random two-layer Llama and a tokenizer of bytes, in Hugging Face format.

    257 tokens: the bytes, and ``<|end|>`` (256), which ends a turn and pads. Seeded, so that two calls give one model.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|end|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    fast.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return fast
