"""Verifiers: graders that compare a reply with the task's answer by rule, in time linear in the reply's length.

The reply is hostile text. It is never evaluated, and no part of it is repeated in a verdict but a short number.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import unicodedata
from decimal import Decimal, InvalidOperation

from fourstroke.errors import DataError
from fourstroke.types import Episode, Scored, Task

# A run of these characters can hold a number. A longer run than the bound is no honest answer, and is not parsed.
_RUN_CHARACTERS = frozenset("0123456789.,eE+-\u2212")
_MAX_RUN_CHARACTERS = 4096

# The sign counts only where it cannot be a minus between two terms; a separator only before exactly three digits. No
# branch can match a prefix of another's text in two ways, so time is linear. The repeated group is not possessive: that
# of Python 3.11.2 matches "12,345,6789" as a whole.
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))+|[0-9]++)(?:\.[0-9]++)?|(?<![0-9.])\.[0-9]++)"
    r"(?:[eE][-+]?[0-9]++)?"
)


def exact(*, ignore_case: bool = False) -> ExactGrader:
    """A grader that scores 1 where the whole reply is the answer, else 0.

    Both are compared in Unicode's NFC form, with each run of white space as one space and none at the ends.

    Args:
        ignore_case: Compare case-folded text.

    Example:
        >>> exact().name.split("@")[0]
        'exact'
    """
    return ExactGrader(ignore_case=ignore_case)


def numeric() -> NumericGrader:
    """A grader that scores 1 where the last number in the reply equals the answer, else 0.

    Numbers are decimals in ASCII digits, with an optional sign (also U+2212), thousands separators ("1,250"), a
    fraction and an exponent; they are compared exactly. A full stop after a number is punctuation, and -0 equals 0.

    Example:
        >>> numeric().name.split("@")[0]
        'numeric'
    """
    return NumericGrader()


class ExactGrader:
    """See :func:`exact`."""

    def __init__(self, *, ignore_case: bool) -> None:
        self._ignore_case = ignore_case
        self._name = f"exact@{_source_digest(f'ignore_case={ignore_case}')}"

    @property
    def name(self) -> str:
        """``exact`` with a digest of the code and its setting."""
        return self._name

    async def grade(self, task: Task, episode: Episode) -> Scored:
        """1 where the reply is the answer.

        Raises:
            DataError: The task's answer is empty, so that an empty reply would be right.
        """
        answer = self._normal(task.answer)
        if not answer:
            raise DataError(f"task {task.id} has an empty answer; the exact grader needs one")
        reply = " ".join(episode.reply.split())
        # NFC joins at most four code points into one. Longer text cannot be equal, and normalising it can be quadratic.
        is_equal = len(reply) <= 4 * len(answer) and self._normal(reply) == answer
        score = float(is_equal)
        reason = "equal" if is_equal else "not equal" if reply else "empty reply"
        return Scored(score=score, components={"exact": score}, reason=reason, grader=self._name, cost_s=0.0)

    def _normal(self, text: str) -> str:
        normal = unicodedata.normalize("NFC", " ".join(text.split()))
        return unicodedata.normalize("NFC", normal.casefold()) if self._ignore_case else normal


class NumericGrader:
    """See :func:`numeric`."""

    def __init__(self) -> None:
        self._name = f"numeric@{_source_digest('')}"

    @property
    def name(self) -> str:
        """``numeric`` with a digest of the code."""
        return self._name

    async def grade(self, task: Task, episode: Episode) -> Scored:
        """1 where the last number of the reply equals the answer.

        Raises:
            DataError: The task's answer is not a number.
        """
        match = _NUMBER.fullmatch(task.answer.strip())
        answer = _decimal(match.group()) if match else None
        if answer is None:
            raise DataError(f"task {task.id} has the answer {task.answer!r}; the numeric grader needs a number")
        score, reason = _compare(episode.reply, answer)
        return Scored(score=score, components={"numeric": score}, reason=reason, grader=self._name, cost_s=0.0)


def _compare(reply: str, answer: Decimal) -> tuple[float, str]:
    end = 1 + max(reply.rfind(digit) for digit in "0123456789")
    if end == 0:
        return 0.0, "no number"
    start = end
    while start > 0 and reply[start - 1] in _RUN_CHARACTERS:
        start -= 1
        if end - start > _MAX_RUN_CHARACTERS:
            return 0.0, "number too long"
    *_, last = _NUMBER.finditer(reply, start, end)
    value = _decimal(last.group())
    if value is None:
        return 0.0, "number out of range"
    return (1.0, "equal") if value == answer else (0.0, f"not equal: {last.group()[:40]}")


def _decimal(text: str) -> Decimal | None:
    """The exact value, or None where the exponent lies outside what ``decimal`` can hold."""
    try:
        return Decimal(text.replace(",", "").replace("\u2212", "-"))
    except InvalidOperation:
        return None


def _source_digest(setting: str) -> str:
    source = inspect.getsource(sys.modules[__name__])
    return hashlib.sha256(f"{source}\n{setting}".encode()).hexdigest()[:8]
