"""Token ids to the text of each token, for readers of a run folder. Loads a tokenizer's file alone, never a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourstroke.errors import ModelNotFoundError, boundary


class TokenPieces:
    """The text of single tokens, special ones too.

    A token that holds part of a character reads as U+FFFD, since that part is no text.

    Example:
        >>> TokenPieces(folder).pieces([9906])  # doctest: +SKIP
        ['Hello']
    """

    def __init__(self, model_path: Path) -> None:
        """Load ``tokenizer.json`` of ``model_path``.

        Raises:
            ModelNotFoundError: The file is missing or damaged.
        """
        from tokenizers import Tokenizer  # comes with transformers; a viewer without it shows ids

        with boundary(f"the tokenizer in {model_path} cannot be loaded", ModelNotFoundError):
            self._tokenizer: Any = Tokenizer.from_file(str(model_path / "tokenizer.json"))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One text for each id."""
        decoded: list[str] = self._tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
        return decoded

    def text(self, ids: Sequence[int]) -> str:
        """All ids as one text, special tokens too."""
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return decoded
