"""Lengths of replies against the configured maximum; the longest reply of a batch is never the measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fourstroke.errors import DataError
from fourstroke.types import Episode, EpisodeRecord, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStats:
    """Shares and mean over ``num_episodes`` episodes.

    Attributes:
        num_episodes: The population and denominator.
        num_truncated: Episodes that were stopped by length: a cut, never a finish.
        num_at_cap: Episodes with the configured maximum of tokens, however they ended.
        mean_tokens: Mean number of sampled tokens, the stop token included.
    """

    num_episodes: int
    num_truncated: int
    num_at_cap: int
    mean_tokens: float

    @property
    def truncated_fraction(self) -> float:
        """Share of episodes that were stopped by length."""
        return self.num_truncated / self.num_episodes

    @property
    def at_cap_fraction(self) -> float:
        """Share of episodes as long as the configured maximum."""
        return self.num_at_cap / self.num_episodes


def length_stats(episodes: Sequence[Episode | EpisodeRecord], *, max_tokens: int) -> LengthStats:
    """Count cut and full-length episodes.

    Args:
        episodes: Episodes that were sampled; leave failed ones out.
        max_tokens: The configured maximum of a reply, in tokens.

    Raises:
        DataError: There is no episode, so that no share is defined.

    Example:
        >>> length_stats(episodes, max_tokens=100).truncated_fraction  # doctest: +SKIP
        0.25
    """
    if not episodes:
        raise DataError("no episode was sampled, so lengths have no mean")
    tokens = [episode.num_sampled_tokens for episode in episodes]
    return LengthStats(
        num_episodes=len(episodes),
        num_truncated=sum(episode.stop is StopReason.LENGTH for episode in episodes),
        num_at_cap=sum(count >= max_tokens for count in tokens),
        mean_tokens=sum(tokens) / len(tokens),
    )
