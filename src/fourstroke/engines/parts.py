"""A completion in parts: what was sampled before requests were cut, and what they went on with.

    prompt | part 0 .......... cut | part 1 ..... cut | part 2 ......... end
           '--- request 0 ---------'
    '------- prompt of request 1 --'--- request 1 ----'

Pure: seeds and joining alone. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourstroke.types import Completion, VersionRun

# Multiplicative hashing (Knuth, The Art of Computer Programming 3, 6.4): odd, and in no small relation to each other.
_SEED_FACTOR = 0x9E3779B97F4A7C15
_LENGTH_FACTOR = 0xBF58476D1CE4E5B9


def member_seed(seed: int, *, member: int, num_tokens: int = 0) -> int:
    """The seed of a member's own generator, in [0, 2**63): far from those of neighbouring requests.

    A member that goes on after a cut draws from a fresh generator; with the seed of its first part it would meet the
    random numbers again that its first tokens were drawn with.

    Args:
        seed: The request's seed.
        member: Which of its completions, from 0.
        num_tokens: Tokens that the completion has already.

    Example:
        >>> member_seed(7, member=0) == member_seed(7, member=0, num_tokens=5)
        False
    """
    return (seed * _SEED_FACTOR + num_tokens * _LENGTH_FACTOR + member) % 2**63


def join_parts(parts: Sequence[Completion]) -> Completion:
    """One completion out of its parts, in order: all tokens with their versions, and how the last part ended.

    Example:
        >>> def part(token: int, stop: StopReason) -> Completion:
        ...     run = VersionRun(version=3, num_tokens=1)
        ...     return Completion(ids=np.array([token], np.int32), logprobs=np.array([-0.5], np.float32),
        ...                       versions=(run,), stop=stop, engine="vllm-0")
        >>> from fourstroke.types import StopReason
        >>> whole = join_parts([part(5, StopReason.ABORTED), part(2, StopReason.FINISHED)])
        >>> whole.ids.tolist(), whole.versions[0].num_tokens, whole.stop.value
        ([5, 2], 2, 'finished')
    """
    return Completion(
        ids=np.concatenate([part.ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=merge_runs([run for part in parts for run in part.versions]),
        stop=parts[-1].stop,
        engine=parts[-1].engine,
    )


def merge_runs(runs: Sequence[VersionRun]) -> tuple[VersionRun, ...]:
    """The same tokens in as few runs as there can be: neighbours of one version become one.

    Example:
        >>> merged = merge_runs([VersionRun(version=version, num_tokens=2) for version in (3, 3, 4)])
        >>> [(run.version, run.num_tokens) for run in merged]
        [(3, 4), (4, 2)]
    """
    merged: list[VersionRun] = []
    for run in runs:
        if merged and merged[-1].version == run.version:
            num_tokens = merged.pop().num_tokens + run.num_tokens
            merged.append(VersionRun(version=run.version, num_tokens=num_tokens))
        else:
            merged.append(run)
    return tuple(merged)
