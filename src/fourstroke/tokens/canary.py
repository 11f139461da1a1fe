"""The fixed tokens by which a trainer and an engine prove that they hold the same weights.

Ordinary text in the model's own tokens: on what a model was made for its numbers are steady, and depend on all of it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from fourstroke.errors import ModelNotFoundError, boundary

_NUM_ROWS, _NUM_TOKENS = 2, 32

_TEXT = (
    "The kettle had been on the stove for a quarter of an hour when the letter came. Nobody in the house could "
    "say who had sent it, but the stamp was from Lisbon and the hand was a doctor's. What is 17 + 25? The answer "
    "is 42, since 17 + 20 is 37 and 37 + 5 is 42. def mean(values): return sum(values) / len(values) # fails on "
    "an empty list. Water boils at 100 degrees at sea level; on a mountain of 3,000 metres it does so at about "
    "90. She read it twice, put it into her pocket, and asked whether there was any bread left."
)


def canary_ids(model_path: Path, *, vocab_size: int) -> np.ndarray:
    """int32 [rows, tokens]: the text's tokens; ids spread over the vocabulary where the folder has no tokenizer file.

    Args:
        model_path: Folder in Hugging Face format.
        vocab_size: Ids that the model has an embedding for.

    Example:
        >>> canary_ids(Path("no-such-model"), vocab_size=1000).shape
        (2, 32)
    """
    from tokenizers import Tokenizer

    num_ids = _NUM_ROWS * _NUM_TOKENS
    ids = np.linspace(0, vocab_size - 1, num_ids).astype(np.int32)
    found = np.zeros(0, dtype=np.int32)
    with suppress(ModelNotFoundError), boundary(f"tokenizer.json in {model_path}", ModelNotFoundError):
        found = np.array(Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(_TEXT).ids, dtype=np.int32)
    found = found[found < vocab_size][:num_ids]
    ids[: len(found)] = found
    return ids.reshape(_NUM_ROWS, _NUM_TOKENS)
