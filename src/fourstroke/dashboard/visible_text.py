"""Text that a model wrote, made fit to be shown: nothing invisible stays invisible, and nothing is endless.

Escaping for HTML is the templates' work and always on; this is about what a browser would still obey or hide in text:
control characters, marks that turn the direction of writing, lone halves of characters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fourstroke.observability import printable


def visible(text: str) -> str:
    r"""The text with its lines kept and each other control or format character written as an escape.

    Example:
        >>> visible("one\ntwo\x1b[31m \u202eabc")
        'one\ntwo\\x1b[31m \\u202eabc'
    """
    return "\n".join(printable(line, most=len(line)) for line in text.split("\n"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """One part of a long text.

    Attributes:
        text: The part, visible.
        number: Which part, from 1.
        num_parts: How many there are; 1 at least.
        num_chars: Characters of the whole text.

    Example:
        >>> text_part("abcdef", number=2, size=4).text
        'ef'
    """

    text: str
    number: int
    num_parts: int
    num_chars: int


def text_part(text: str, *, number: int, size: int) -> TextPart:
    """Part ``number`` (from 1) of a text cut every ``size`` characters; a number out of range is the nearest part.

    Example:
        >>> part = text_part("abcdef", number=9, size=4)
        >>> part.text, part.number, part.num_parts, part.num_chars
        ('ef', 2, 2, 6)
    """
    num_parts = max(1, math.ceil(len(text) / size))
    number = min(max(1, number), num_parts)
    return TextPart(
        text=visible(text[(number - 1) * size : number * size]),
        number=number,
        num_parts=num_parts,
        num_chars=len(text),
    )
