"""Identity of tasks and the held-out split: pure functions of a task's content, with no list kept anywhere.

A task's id is a digest of its prompt and answer, so equal problems are one task. Its side is decided by a digest of the
prompt alone, so that no prompt can stand on both sides, whatever its answers, its order or the other tasks.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable

from fourstroke.errors import ConfigError
from fourstroke.types import Message, Task


def task_of(prompt: tuple[Message, ...], *, answer: str) -> Task:
    """The task with this content; its id is the first 16 hex digits of the content's SHA-256.

    Text is compared in Unicode's NFC form, so two spellings of one character do not make two tasks.

    Example:
        >>> task_of((Message(role="user", content="What is 3 + 4?"),), answer="7").id
        'f5d6279253e12038'
    """
    return Task(id=_digest(prompt, answer)[:16], prompt=prompt, answer=answer)


def is_held_out(prompt: tuple[Message, ...], *, fraction: float) -> bool:
    """Whether tasks with this prompt are held out; true for about ``fraction`` of all prompts.

    A larger fraction only adds prompts to the held-out side.

    Example:
        >>> is_held_out((Message(role="user", content="What is 3 + 4?"),), fraction=1.0)
        True
    """
    return int(_digest(prompt, "")[16:32], 16) < fraction * 2**64


def split(tasks: Iterable[Task], *, fraction: float) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """``(train, held_out)``, each in the order given; tasks of one id are kept once.

    Raises:
        ConfigError: ``fraction`` does not lie between 0 and 1.

    Example:
        >>> seven = task_of((Message(role="user", content="What is 3 + 4?"),), answer="7")
        >>> [len(side) for side in split([seven, seven], fraction=0.0)]
        [1, 0]
    """
    if not 0 <= fraction <= 1:
        raise ConfigError(f"held_out_fraction = {fraction!r} is no share; set it between 0 and 1")
    distinct: dict[str, Task] = {}
    for task in tasks:
        distinct.setdefault(task.id, task)
    sides: tuple[list[Task], list[Task]] = ([], [])
    for task in distinct.values():
        sides[is_held_out(task.prompt, fraction=fraction)].append(task)
    return tuple(sides[0]), tuple(sides[1])


def _digest(prompt: tuple[Message, ...], answer: str) -> str:
    """SHA-256 of the content, written as JSON so that no two contents run together into one text."""
    content = [[message.role, _normal(message.content)] for message in prompt]
    return hashlib.sha256(json.dumps([content, _normal(answer)]).encode()).hexdigest()


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text)
