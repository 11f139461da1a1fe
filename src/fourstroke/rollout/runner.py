"""Runs one group: opens the members' environments, samples their replies, lets the environments answer, grades.

    draw, task -> environments --messages--> renderer --ids--> engine --ids--> environments -> Episode -> grader

It knows nothing of training, slots or weights; a member that fails becomes a typed outcome, not an exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np

from fourstroke.config import RunConfig
from fourstroke.errors import DataError, DoesNotFitError, FourstrokeError, boundary
from fourstroke.rewards import grade
from fourstroke.tokens.render import TokenRenderer
from fourstroke.types import (
    Completion,
    Draw,
    Engine,
    Environment,
    Episode,
    GradedEpisode,
    Grader,
    Group,
    MaskReason,
    Message,
    SampleRequest,
    Span,
    StopReason,
    Task,
    Taskset,
    Timings,
)


class EnvironmentFailedError(FourstrokeError, RuntimeError):
    """An environment raised; the member's episode ends as ``FAILED``."""


class GroupRunner:
    """Runs groups for training and for evaluation alike: one runner, one grader, one temperature."""

    def __init__(
        self, config: RunConfig, *, taskset: Taskset, grader: Grader, engine: Engine, renderer: TokenRenderer
    ) -> None:
        self._config = config
        self._taskset = taskset
        self._grader = grader
        self._engine = engine
        self._renderer = renderer

    async def run(self, draw: Draw, task: Task, *, num_samples: int, admitted_version: int, attempt: int = 0) -> Group:
        """Sample and grade ``num_samples`` members of a draw.

        Args:
            draw: The draw; its seed fixes the environments and the samples.
            task: The draw's task.
            num_samples: Members of the group, G.
            admitted_version: Weight version when the draw took its slot.
            attempt: How many times this draw was rolled before.

        Raises:
            DoesNotFitError: The prompt and a full reply exceed the context; nothing was sampled.
            EngineDiedError: The engine is gone.
        """
        async with AsyncExitStack() as stack:
            environments = [self._taskset.open(task, draw.seed) for _ in range(num_samples)]
            for environment in environments:
                stack.push_async_callback(environment.close)
            prompts = await asyncio.gather(*(self._first_prompt(environment, task) for environment in environments))
            loop = asyncio.get_running_loop()
            started = loop.time()
            completions = await self._sample(draw, prompts, attempt)
            generate_s = loop.time() - started
            episodes = await asyncio.gather(
                *(
                    self._finish(draw, member, prompt, completion, environment, attempt, generate_s)
                    for member, (prompt, completion, environment) in enumerate(
                        zip(prompts, completions, environments, strict=True)
                    )
                )
            )
        members = await asyncio.gather(*(self._graded(task, episode) for episode in episodes))
        return Group(draw=draw, members=tuple(members), admitted_version=admitted_version)

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

    async def _sample(
        self, draw: Draw, prompts: Sequence[np.ndarray | FourstrokeError], attempt: int
    ) -> tuple[Completion | None, ...]:
        """One completion a member. Members share task and seed, so equal prompts go out as one request."""
        by_prompt: dict[bytes, list[int]] = {}
        for member, prompt in enumerate(prompts):
            if not isinstance(prompt, FourstrokeError):
                by_prompt.setdefault(prompt.tobytes(), []).append(member)
        requests = [self._request(draw, prompts, members, attempt) for members in by_prompt.values()]
        answers = await asyncio.gather(*(self._engine.generate(request) for request in requests))
        completions: list[Completion | None] = [None] * len(prompts)
        for members, answer in zip(by_prompt.values(), answers, strict=True):
            for member, completion in zip(members, answer, strict=True):
                completions[member] = completion
        return tuple(completions)

    def _request(
        self, draw: Draw, prompts: Sequence[np.ndarray | FourstrokeError], members: list[int], attempt: int
    ) -> SampleRequest:
        prompt = prompts[members[0]]
        assert not isinstance(prompt, FourstrokeError), (draw.key, members)
        return SampleRequest(
            id=f"{draw.key}.a{attempt}.m{members[0]}",
            prompt_ids=prompt,
            num_samples=len(members),
            max_tokens=self._config.rollout.max_tokens,
            temperature=self._config.rollout.temperature,
            stop_ids=self._renderer.stop_ids,
            seed=draw.seed + members[0],
        )

    async def _finish(
        self,
        draw: Draw,
        member: int,
        prompt: np.ndarray | FourstrokeError,
        completion: Completion | None,
        environment: Environment,
        attempt: int,
        generate_s: float,
    ) -> Episode:
        spans: tuple[Span, ...]
        messages: tuple[Message, ...]
        if isinstance(prompt, FourstrokeError):
            spans, messages, stop = (), (_failure(prompt),), StopReason.FAILED
        else:
            assert completion is not None, (draw.key, member)
            spans = _spans(prompt, completion)
            reply = Message(role="assistant", content=self._renderer.decode(completion.ids))
            messages, stop = await self._answered(environment, reply, completion.stop, draw)
        return Episode(
            id=f"{draw.key}.{member}",
            group=draw.key,
            member=member,
            task_id=draw.task_id,
            attempt=attempt,
            spans=spans,
            stop=stop,
            messages=messages,
            timings=Timings(generate_s=generate_s),
        )

    async def _answered(
        self, environment: Environment, reply: Message, stop: StopReason, draw: Draw
    ) -> tuple[tuple[Message, ...], StopReason]:
        """Show the reply to the environment, which must then be at its end; the evidence and why the episode ended."""
        try:
            with boundary(f"step of task {draw.task_id}", EnvironmentFailedError):
                observation = await environment.step(reply)
        except FourstrokeError as error:
            return (reply, _failure(error)), StopReason.FAILED
        if not observation.is_final:
            raise DataError(
                f"the environment of task {draw.task_id} asks for a second turn; use one that ends after one reply"
            )
        return (reply, *observation.messages), stop

    async def _graded(self, task: Task, episode: Episode) -> GradedEpisode:
        verdict = await grade(self._grader, task, episode, timeout_s=self._config.deadlines.grade_s)
        return GradedEpisode(episode=episode, verdict=verdict)


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
