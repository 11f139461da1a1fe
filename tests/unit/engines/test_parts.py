"""Seeds of members and their continuations, and the joining of parts, against plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.engines.parts import join_parts, member_seed, merge_runs
from fourstroke.types import Completion, StopReason, VersionRun


def test_seeds_of_neighbouring_requests_and_continuations_lie_far_apart() -> None:
    """Members take the seeds from their request's upwards, and no group has a million of them."""
    seeds = sorted(
        member_seed(seed, member=0, num_tokens=num_tokens) for seed in range(200) for num_tokens in (0, *range(1, 60))
    )

    assert min(right - left for left, right in pairwise(seeds)) > 1_000_000
    assert 0 <= seeds[0] <= seeds[-1] < 2**63


def test_members_have_seeds_of_their_own() -> None:
    seeds = {member_seed(7, member=member, num_tokens=n) for member in range(16) for n in range(64)}

    assert len(seeds) == 16 * 64


def make_part(ids: Sequence[int], versions: Sequence[int], *, stop: StopReason = StopReason.ABORTED) -> Completion:
    return Completion(
        ids=np.array(ids, dtype=np.int32),
        logprobs=np.array([-0.25 * token for token in ids], dtype=np.float32),
        versions=tuple(VersionRun(version=version, num_tokens=1) for version in versions),
        stop=stop,
        engine="vllm-0",
    )


def test_parts_become_one_completion() -> None:
    whole = join_parts(
        [
            make_part([5, 6], [0, 0]),
            make_part([], []),
            make_part([7], [0]),
            make_part([8, 2], [1, 1], stop=StopReason.FINISHED),
        ]
    )

    assert whole.ids.tolist() == [5, 6, 7, 8, 2]
    assert whole.ids.dtype == np.int32
    assert whole.logprobs.tolist() == [-1.25, -1.5, -1.75, -2.0, -0.5]
    assert whole.logprobs.dtype == np.float32
    assert [(run.version, run.num_tokens) for run in whole.versions] == [(0, 3), (1, 2)]
    assert whole.stop is StopReason.FINISHED


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3))))
def test_merged_runs_cover_the_same_tokens(runs: list[tuple[int, int]]) -> None:
    tokens = [version for version, num_tokens in runs for _ in range(num_tokens)]

    merged = merge_runs([VersionRun(version=version, num_tokens=num_tokens) for version, num_tokens in runs])

    assert [(run.version, run.num_tokens) for run in merged] == [(v, len(list(same))) for v, same in groupby(tokens)]
