"""Episodes, groups and their records made by hand, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourstroke.types import (
    Draw,
    Episode,
    EpisodeRecord,
    GradedEpisode,
    Group,
    GroupRecord,
    MaskReason,
    Message,
    PayloadReference,
    RowShape,
    Scored,
    Span,
    StopReason,
    Timings,
    Unscored,
    Verdict,
    VersionRun,
)

# The reference of a record whose group was never stored.
NOWHERE = PayloadReference(segment=0, offset=0, length=0, digest="0" * 16)


def prompt_span(ids: Sequence[int], *, parent: int = -1) -> Span:
    """A span of prompt tokens."""
    empty = np.empty(0, np.float32)
    return Span(
        parent=parent, ids=np.array(ids, np.int32), logprobs=empty, reason=MaskReason.PROMPT, versions=(), engine=""
    )


def sampled_span(ids: Sequence[int], logprobs: Sequence[float], *, parent: int, version: int = 0) -> Span:
    """A span of sampled tokens."""
    return Span(
        parent=parent,
        ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        reason=MaskReason.SAMPLED,
        versions=(VersionRun(version=version, num_tokens=len(ids)),),
        engine="fake-0",
    )


def make_episode(
    spans: Sequence[Span],
    *,
    group: str = "e0000-i000000",
    member: int = 0,
    reply: str = "7",
    stop: StopReason = StopReason.FINISHED,
) -> Episode:
    """An episode of the given spans."""
    return Episode(
        id=f"{group}.{member}",
        group=group,
        member=member,
        task_id="task",
        attempt=0,
        spans=tuple(spans),
        stop=stop,
        messages=(Message(role="assistant", content=reply),),
        timings=Timings(generate_s=0.0),
    )


def make_group(
    scores: Sequence[float | None],
    *,
    epoch: int = 0,
    index: int = 0,
    version: int = 0,
    reply_lengths: Sequence[int] | None = None,
) -> Group:
    """A group with one member a score; None stands for a member that could not be scored.

    Args:
        scores: Score of each member.
        epoch: Epoch of the draw.
        index: Index of the draw; both give the group its id.
        version: Version that it was admitted and sampled at.
        reply_lengths: Sampled tokens of each member, after two of the prompt; 3 each if not given.
    """
    draw = Draw(epoch=epoch, index=index, task_id=f"task-{index}", seed=index)
    lengths = reply_lengths if reply_lengths is not None else [3] * len(scores)
    members = []
    for member, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        ids = [10 + member] * length
        spans = [prompt_span([1, 2]), sampled_span(ids, [-1.0] * length, parent=0, version=version)]
        verdict: Verdict = Unscored(reason="error", detail="", grader="fake", cost_s=0.0)
        if score is not None:
            verdict = Scored(score=score, components={}, reason="", grader="fake", cost_s=0.0)
        episode = make_episode(spans, group=draw.key, member=member)
        members.append(GradedEpisode(episode=episode, verdict=verdict))
    return Group(draw=draw, members=tuple(members), admitted_version=version)


def make_record(
    group: Group,
    *,
    incarnation: int = 0,
    attempt: int = 0,
    reference: PayloadReference = NOWHERE,
) -> GroupRecord:
    """What the controller keeps of a group of :func:`make_group`.

    Args:
        group: The group.
        incarnation: Incarnation of the attempt that it is the result of.
        attempt: Number of that attempt.
        reference: Where it is stored; nowhere if not given.
    """
    return GroupRecord(
        draw=group.draw,
        admitted_version=group.admitted_version,
        incarnation=incarnation,
        attempt=attempt,
        episodes=tuple(_episode_record(member) for member in group.members),
        reference=reference,
    )


def _episode_record(member: GradedEpisode) -> EpisodeRecord:
    prompt, reply = member.episode.spans
    shape = RowShape(
        num_tokens=len(prompt.ids) + len(reply.ids),
        num_loss_tokens=len(reply.ids),
        num_shared_tokens=len(prompt.ids) if member.episode.member else 0,
    )
    return EpisodeRecord(
        member=member.episode.member,
        stop=member.episode.stop,
        verdict=member.verdict,
        num_sampled_tokens=len(reply.ids),
        versions=reply.versions,
        rows=(shape,),
        failure="",
    )
