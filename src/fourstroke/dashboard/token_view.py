"""The tokens of an episode as shown: text, log-probability, version, mask reason, and the class of a colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fourstroke.dashboard.charts import number_text
from fourstroke.dashboard.visible_text import visible
from fourstroke.tokens.pieces import TokenPieces
from fourstroke.types import Episode, Span


class Colouring(StrEnum):
    """What the colour of a token tells."""

    LOGPROB = "log-probability"
    ADVANTAGE = "advantage"
    MASK = "mask reason"
    VERSION = "version"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One token.

    Attributes:
        position: In the episode, over its spans in order, from 0.
        id: The token.
        piece: Its text, visible; its id where there is no tokenizer.
        logprob: At sampling, as text; "-" where it was not sampled.
        probability: The same as a probability.
        version: That sampled it; "-" where it was not sampled.
        reason: The mask reason of its span.
        engine: That sampled it.
        parent: Position of the span that its own follows; -1 for a root.
        colour: Class of its colour.
    """

    position: int
    id: int
    piece: str
    logprob: str
    probability: str
    version: str
    reason: str
    engine: str
    parent: int
    colour: str

    @property
    def title(self) -> str:
        """All of it in one line."""
        if self.version == "-":
            return f"{self.position}: id {self.id}, {self.reason}"
        return (
            f"{self.position}: id {self.id}, log-probability {self.logprob} (probability {self.probability}), "
            f"version {self.version}, {self.reason}, {self.engine}"
        )


# Least probability of each class, the likeliest first.
PROBABILITIES = (0.9, 0.5, 0.2, 0.05, 0.01, 0.0)
_NUM_VERSION_COLOURS = 6
_MASKS = ("sampled", "prompt", "observation", "truncated", "shared")


def probability_class(logprob: float) -> int:
    """Number of the class of a log-probability, 0 for the likeliest; 5 for what is no number.

    Example:
        >>> probability_class(0.0), probability_class(-0.7), probability_class(-9.0), probability_class(float("nan"))
        (0, 2, 5, 5)
    """
    probability = math.exp(min(logprob, 0.0)) if not math.isnan(logprob) else 0.0
    return next(number for number, least in enumerate(PROBABILITIES) if probability >= least)


def token_views(
    episode: Episode,
    *,
    first: int,
    count: int,
    tokenizer: TokenPieces | None,
    advantage: float | None,
    colouring: Colouring,
) -> list[TokenView]:
    """``count`` tokens of an episode from position ``first`` on.

    Args:
        episode: Whose.
        first: Position of the first.
        count: Most to give.
        tokenizer: Gives the text of each; None shows ids.
        advantage: Of the episode, if it was trained on.
        colouring: What the colours tell.
    """
    views: list[TokenView] = []
    start = 0
    for span in episode.spans:
        low, high = max(first - start, 0), min(first + count - start, len(span.ids))
        if low < high:
            views += _span_views(
                span, low=low, high=high, start=start, tokenizer=tokenizer, advantage=advantage, colouring=colouring
            )
        start += len(span.ids)
    return views


def _span_views(
    span: Span,
    *,
    low: int,
    high: int,
    start: int,
    tokenizer: TokenPieces | None,
    advantage: float | None,
    colouring: Colouring,
) -> list[TokenView]:
    ids = span.ids[low:high].tolist()
    pieces = [f"{i} " for i in ids] if tokenizer is None else tokenizer.pieces(ids)
    versions = [run.version for run in span.versions for _ in range(run.num_tokens)]
    views = []
    for at, (token, piece) in enumerate(zip(ids, pieces, strict=True), start=low):
        logprob = float(span.logprobs[at]) if span.is_sampled else math.nan
        version = versions[at] if span.is_sampled else None
        views.append(
            TokenView(
                position=start + at,
                id=token,
                piece=visible(piece) or "\u2205",
                logprob=f"{logprob:.4f}" if span.is_sampled else "-",
                probability=f"{math.exp(min(logprob, 0.0)):.4f}" if span.is_sampled else "-",
                version="-" if version is None else str(version),
                reason=span.reason.value,
                engine=visible(span.engine) or "-",
                parent=span.parent,
                colour=_colour(colouring, span=span, logprob=logprob, version=version, advantage=advantage),
            )
        )
    return views


def _colour(colouring: Colouring, *, span: Span, logprob: float, version: int | None, advantage: float | None) -> str:
    if colouring is Colouring.MASK:
        return f"mask-{span.reason.value}"
    if version is None:
        return "unsampled"
    if colouring is Colouring.LOGPROB:
        return f"p{probability_class(logprob)}"
    if colouring is Colouring.VERSION:
        return f"v{version % _NUM_VERSION_COLOURS}"
    if advantage is None or span.reason.value != "sampled":
        return "unsampled"
    return "a-plus" if advantage > 0 else "a-minus" if advantage < 0 else "a-zero"


def legend_of(colouring: Colouring, tokens: Sequence[TokenView]) -> list[tuple[str, str]]:
    """Classes of colours with what they mean, in order.

    Example:
        >>> legend_of(Colouring.LOGPROB, [])[0]
        ('p0', 'probability 0.9 and more')
    """
    match colouring:
        case Colouring.LOGPROB:
            named = [f"{number_text(least)} and more" for least in PROBABILITIES[:-1]]
            return [(f"p{n}", f"probability {text}") for n, text in enumerate([*named, f"below {PROBABILITIES[-2]}"])]
        case Colouring.ADVANTAGE:
            return [("a-plus", "above 0"), ("a-zero", "0"), ("a-minus", "below 0"), ("unsampled", "not trained on")]
        case Colouring.MASK:
            return [(f"mask-{name}", name) for name in _MASKS]
    versions = sorted({int(token.version) for token in tokens if token.version != "-"})
    return [(f"v{version % _NUM_VERSION_COLOURS}", f"version {version}") for version in versions]
