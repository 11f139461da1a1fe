"""Runs groups: opens the members' environments, samples their replies, lets the environments answer, grades.

    assignment -> environments --messages--> renderer --ids--> sampler --ids--> environments -> Episode -> graders

It knows nothing of training, slots or weights; a member that fails becomes a typed outcome, not an exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fourstroke.config import RunConfig
from fourstroke.errors import DataError, DoesNotFitError, FourstrokeError, boundary
from fourstroke.observability import Waits
from fourstroke.tokens.render import TokenRenderer
from fourstroke.types import (
    Assignment,
    Completion,
    Environment,
    Episode,
    GradedEpisode,
    Group,
    MaskReason,
    Message,
    RefusedGroup,
    Sampler,
    SampleRequest,
    Span,
    StopReason,
    Task,
    Taskset,
    Timings,
    Verdict,
)


class EnvironmentFailedError(FourstrokeError, RuntimeError):
    """An environment raised; the member's episode ends as ``FAILED``."""


class Graders(Protocol):
    """What the runner asks of the rewards room: a verdict on each episode, whatever the grader does."""

    async def start(self) -> None:
        """Be ready to grade."""
        ...

    async def grade(self, task: Task, episode: Episode) -> Verdict:
        """The verdict, or ``Unscored`` with the reason why there is none."""
        ...

    async def close(self) -> None:
        """End every process of the graders."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenGroup:
    """A group whose environments are open and whose prompts are known; a member's prompt may be why it failed."""

    assignment: Assignment
    environments: tuple[Environment, ...]
    prompts: tuple[np.ndarray | FourstrokeError, ...]
    requests: tuple[SampleRequest, ...]
    members_of: tuple[tuple[int, ...], ...]  # for each request


class GroupRunner:
    """Runs groups for training and for evaluation alike: one runner, one grader, one temperature."""

    def __init__(
        self,
        config: RunConfig,
        *,
        taskset: Taskset,
        graders: Graders,
        sampler: Sampler,
        renderer: TokenRenderer,
        waits: Waits,
    ) -> None:
        self._config = config
        self._taskset = taskset
        self._graders = graders
        self._sampler = sampler
        self._renderer = renderer
        self._waits = waits

    async def start(self) -> None:
        """Start the graders."""
        await self._graders.start()

    async def run(self, assignments: Sequence[Assignment], *, is_together: bool) -> tuple[Group | RefusedGroup, ...]:
        """Sample and grade groups; answers in the order of the assignments.

        Args:
            assignments: One or more; a draw's seed fixes its environments and samples.
            is_together: Sample all of them as one batch that repeats bit for bit.

        Raises:
            EngineDiedError: The engine is gone.
        """
        async with AsyncExitStack() as stack:
            opened = [await self._open(stack, assignment) for assignment in assignments]
            groups = [group for group in opened if isinstance(group, _OpenGroup)]
            started_s = asyncio.get_running_loop().time()
            answers = await self._sample(groups, is_together=is_together)
            generate_s = asyncio.get_running_loop().time() - started_s
            episodes = [
                await self._episodes(group, completions, generate_s=generate_s)
                for group, completions in zip(groups, answers, strict=True)
            ]
        graded = await asyncio.gather(
            *(self._graded(group.assignment, members) for group, members in zip(groups, episodes, strict=True))
        )
        by_key = {group.id: group for group in graded}
        return tuple(
            refusal if isinstance(refusal, RefusedGroup) else by_key[refusal.assignment.draw.key] for refusal in opened
        )

    async def close(self) -> None:
        """End the graders."""
        await self._graders.close()

    # --- prompts ----------------------------------------------------------------------------------------------------

    async def _open(self, stack: AsyncExitStack, assignment: Assignment) -> _OpenGroup | RefusedGroup:
        task, draw = assignment.task, assignment.draw
        environments = tuple(self._taskset.open(task, draw.seed) for _ in range(assignment.num_samples))
        for environment in environments:
            stack.push_async_callback(environment.close)
        try:
            with self._waits.noted(f"the environments of {assignment.name} to open"):
                first = (self._first_prompt(environment, task) for environment in environments)
                prompts = tuple(await asyncio.gather(*first))
        except DoesNotFitError as error:
            return RefusedGroup(key=draw.key, reason="does_not_fit", detail=str(error))
        # Members share task and seed, so equal prompts go out as one request.
        by_prompt: dict[bytes, list[int]] = {}
        for member, prompt in enumerate(prompts):
            if not isinstance(prompt, FourstrokeError):
                by_prompt.setdefault(prompt.tobytes(), []).append(member)
        members_of = tuple(tuple(members) for members in by_prompt.values())
        requests = tuple(self._request(assignment, prompts[members[0]], members) for members in members_of)
        return _OpenGroup(
            assignment=assignment,
            environments=environments,
            prompts=prompts,
            requests=requests,
            members_of=members_of,
        )

    async def _first_prompt(self, environment: Environment, task: Task) -> np.ndarray | FourstrokeError:
        """Prompt ids of a member, or why its environment failed to start."""
        try:
            with boundary(f"reset of task {task.id}", EnvironmentFailedError):
                observation = await environment.reset()
        except FourstrokeError as error:
            return error
        prompt_ids = self._renderer.prompt_ids(observation.messages)
        max_tokens, context = self._config.rollout.max_tokens, self._config.engine.max_model_len
        if len(prompt_ids) + max_tokens > context:
            raise DoesNotFitError(
                f"task {task.id} has a prompt of {len(prompt_ids)} tokens, which with rollout.max_tokens = "
                f"{max_tokens} exceeds engine.max_model_len = {context}; raise the latter or shorten the task"
            )
        return prompt_ids

    def _request(
        self, assignment: Assignment, prompt: np.ndarray | FourstrokeError, members: Sequence[int]
    ) -> SampleRequest:
        assert not isinstance(prompt, FourstrokeError), (assignment.name, members)
        # The incarnation and the attempt keep a request apart from an earlier try that may still be running.
        tried = f"r{assignment.incarnation}.a{assignment.attempt}"
        return SampleRequest(
            id=f"{assignment.draw.key}.{tried}.m{members[0]}",
            prompt_ids=prompt,
            num_samples=len(members),
            max_tokens=self._config.rollout.max_tokens,
            temperature=self._config.rollout.temperature,
            stop_ids=() if self._config.rollout.ignore_eos else self._renderer.stop_ids,
            seed=assignment.draw.seed + members[0],
        )

    # --- replies ----------------------------------------------------------------------------------------------------

    async def _sample(
        self, groups: Sequence[_OpenGroup], *, is_together: bool
    ) -> list[tuple[tuple[Completion, ...], ...]]:
        """For each group the completions of each of its requests."""
        requests = [request for group in groups for request in group.requests]
        if is_together:
            with self._waits.noted(f"{len(requests)} requests, sampled together"):
                answers = list(await self._sampler.generate_together(requests)) if requests else []
        else:
            answers = await asyncio.gather(*(self._generate(request) for request in requests))
        remaining = iter(answers)
        return [tuple(next(remaining) for _ in group.requests) for group in groups]

    async def _generate(self, request: SampleRequest) -> tuple[Completion, ...]:
        with self._waits.noted(f"request {request.id} to be sampled"):
            return await self._sampler.generate(request)

    async def _episodes(
        self, group: _OpenGroup, answers: Sequence[tuple[Completion, ...]], *, generate_s: float
    ) -> tuple[Episode, ...]:
        completions: dict[int, Completion] = {}
        for members, answer in zip(group.members_of, answers, strict=True):
            completions |= dict(zip(members, answer, strict=True))
        with self._waits.noted(f"the environments of {group.assignment.name} to answer"):
            return tuple(
                await asyncio.gather(
                    *(
                        self._episode(group, member, completions.get(member), generate_s=generate_s)
                        for member in range(len(group.environments))
                    )
                )
            )

    async def _episode(
        self, group: _OpenGroup, member: int, completion: Completion | None, *, generate_s: float
    ) -> Episode:
        draw, prompt = group.assignment.draw, group.prompts[member]
        spans: tuple[Span, ...]
        messages: tuple[Message, ...]
        if isinstance(prompt, FourstrokeError):
            spans, messages, stop = (), (_failure(prompt),), StopReason.FAILED
        else:
            assert completion is not None, (draw.key, member)
            spans = _spans(prompt, completion)
            reply = Message(role="assistant", content=self._renderer.decode(completion.ids))
            task_id = draw.task_id
            messages, stop = await _answered(group.environments[member], reply, completion.stop, task_id=task_id)
        return Episode(
            id=f"{draw.key}.{member}",
            group=draw.key,
            member=member,
            task_id=draw.task_id,
            attempt=group.assignment.attempt,
            spans=spans,
            stop=stop,
            messages=messages,
            timings=Timings(generate_s=generate_s),
        )

    async def _graded(self, assignment: Assignment, episodes: Sequence[Episode]) -> Group:
        with self._waits.noted(f"the grader of {assignment.name}"):
            verdicts = await asyncio.gather(*(self._graders.grade(assignment.task, episode) for episode in episodes))
        members = (
            GradedEpisode(episode=episode, verdict=verdict) for episode, verdict in zip(episodes, verdicts, strict=True)
        )
        return Group(draw=assignment.draw, members=tuple(members), admitted_version=assignment.admitted_version)


async def _answered(
    environment: Environment, reply: Message, stop: StopReason, *, task_id: str
) -> tuple[tuple[Message, ...], StopReason]:
    """Show the reply to the environment, which must then be at its end; the evidence and why the episode ended."""
    try:
        with boundary(f"step of task {task_id}", EnvironmentFailedError):
            observation = await environment.step(reply)
    except FourstrokeError as error:
        return (reply, _failure(error)), StopReason.FAILED
    if not observation.is_final:
        raise DataError(f"the environment of task {task_id} asks for a second turn; use one that ends after one reply")
    return (reply, *observation.messages), stop


def _failure(error: FourstrokeError) -> Message:
    """The evidence of an environment's failure."""
    return Message(role="error", content=str(error))


def _spans(prompt_ids: np.ndarray, completion: Completion) -> tuple[Span, ...]:
    prompt = Span(
        parent=-1,
        ids=prompt_ids,
        logprobs=np.empty(0, np.float32),
        reason=MaskReason.PROMPT,
        versions=(),
        engine=completion.engine,
    )
    reply = Span(
        parent=0,
        ids=completion.ids,
        logprobs=completion.logprobs,
        reason=MaskReason.SAMPLED,
        versions=completion.versions,
        engine=completion.engine,
    )
    return (prompt, reply)
