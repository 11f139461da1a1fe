"""A tiny random Llama on disk, and rows of random tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fourstroke.types import Batch, Column, Trajectory

VOCABULARY = 257


def write_tiny_llama(folder: Path, *, dtype: torch.dtype = torch.float32, is_tied: bool = True) -> Path:
    """A Llama of 2 layers with random weights, in Hugging Face format."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=is_tied,
        initializer_range=0.1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def write_model() -> Callable[..., Path]:
    """The function above."""
    return write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in fp32, with tied embeddings."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


def random_batch(seed: int = 0, *, shapes: tuple[tuple[int, int], ...] = ((5, 4), (3, 7), (9, 2), (4, 4))) -> Batch:
    """Rows of (prompt, reply) tokens; the second reply token of each row is masked, as a tool's answer would be."""
    rng = np.random.default_rng(seed)
    rows = []
    for index, (num_prompt, num_reply) in enumerate(shapes):
        length = num_prompt + num_reply
        mask_T = np.arange(length) >= num_prompt
        mask_T[num_prompt + 1] = False
        columns = {
            Column.IDS: rng.integers(0, VOCABULARY, length, dtype=np.int32),
            Column.LOSS_MASK: mask_T,
            Column.BEHAVIOUR_LOGPROBS: np.where(mask_T, -5 - rng.random(length), 0).astype(np.float32),
            Column.ADVANTAGES: np.where(mask_T, rng.standard_normal(), 0).astype(np.float32),
        }
        rows.append(Trajectory(id=f"row-{index}", group="g", episode=f"e{index}", columns=columns))
    num_loss_tokens = sum(row.num_loss_tokens for row in rows)
    weighted = tuple(
        row.with_columns(weight=np.where(row[Column.LOSS_MASK], 1 / num_loss_tokens, 0).astype(np.float32))
        for row in rows
    )
    return Batch(step=3, rows=weighted, num_sequences=len(rows), num_loss_tokens=num_loss_tokens)


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """The function above."""
    return random_batch
