"""The seams: what the parts of a run ask of each other. Each has a real part and a fake (``fourstroke.testing``), and
one contract suite in ``tests/contract`` that both pass.

All methods that wait are ``async`` and take no deadline of their own: whoever awaits them sets one, with a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fourstroke.types.nouns import (
    Assignment,
    BatchRecord,
    Canary,
    Completion,
    Episode,
    GroupRecord,
    Message,
    Microbatch,
    Observation,
    Publication,
    RefusedGroup,
    SampleRequest,
    StepStats,
    Task,
    Verdict,
    Wait,
    WeightVersion,
)


class Sampler(Protocol):
    """The part of an engine that rollout may use: token ids in, token ids and log-probabilities out."""

    @property
    def name(self) -> str:
        """Name of this engine in spans and logs ("vllm-0")."""
        ...

    async def generate(self, request: SampleRequest) -> tuple[Completion, ...]:
        """Sample ``request.num_samples`` completions. While paused, the request waits for ``resume``.

        A caller that is cancelled takes its request along: the engine stops working on it.

        Raises:
            DataError: A token id lies outside the vocabulary, or prompt and reply do not fit the context.
            EngineDiedError: The engine died before it answered.
        """
        ...

    async def generate_together(self, requests: Sequence[SampleRequest]) -> tuple[tuple[Completion, ...], ...]:
        """Sample all requests as one batch that repeats bit for bit: answers in the order of the requests.

        Legal only while nothing else runs and not paused.

        Raises:
            DataError: As ``generate``; none was sampled.
            EngineDiedError: The engine died before it answered.
        """
        ...


class Engine(Sampler, Protocol):
    """An inference engine under a known weight version.

    Life: ``start`` once, then any number of ``generate`` (concurrently), ``pause``/``update_weights``/``resume``, and
    ``close`` once. ``update_weights`` is legal only while paused. After ``close``, or once the engine has died, every
    call raises ``EngineDiedError``.

    How new weights land on requests that run is the engine's setting (``EngineConfig.landing``). A caller sees the same
    of each: whole completions, of at most ``max_tokens``, whose ``versions`` say which token came of which weights.
    """

    @property
    def version(self) -> WeightVersion:
        """The weights that a request admitted now is sampled under."""
        ...

    async def start(self) -> None:
        """Load the model and be ready to generate, under the version that the engine was made with."""
        ...

    async def pause(self) -> None:
        """Hold new requests, and stop, finish or cut those that run, as the engine's setting says.

        After it no cached value of the present weights serves a request that begins under the next.
        """
        ...

    async def update_weights(self, publication: Publication) -> WeightVersion:
        """Load a publication and return the version that the engine now proves to hold.

        A publication of the very version that is held already (digest included) is accepted, and changes nothing.

        Raises:
            PublicationError: Names, shapes, dtypes, digests or the order of versions are not what they must be;
                nothing was loaded.
        """
        ...

    async def resume(self) -> None:
        """Let requests run again."""
        ...

    async def score(self, ids_BT: np.ndarray) -> Canary:
        """What the weights that are held now say of fixed tokens. Legal at any time, while paused too.

        Without rows where the engine cannot tell.
        """
        ...

    async def check_health(self) -> None:
        """Return if the engine is alive.

        Raises:
            EngineDiedError: It is not; the text names the process and how it ended.
        """
        ...

    async def close(self) -> None:
        """End every process of the engine. May be called twice, and after a death."""
        ...


class Worker(Protocol):
    """Turns assignments into graded groups: environments, sampling through engines, grading, storing.

    After ``close``, or once the worker has died, every call raises ``ActorDiedError``.
    """

    @property
    def name(self) -> str:
        """Name of this worker in logs ("worker-0")."""
        ...

    async def start(self) -> None:
        """Import the user's code and be ready."""
        ...

    async def route(self, engines: Sequence[Engine]) -> None:
        """From now on sample on these engines alone."""
        ...

    async def run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        """Sample, grade and store the groups; answers in the order of the assignments.

        Args:
            assignments: One or more.
            is_together: Sample all of them as one batch that repeats bit for bit.

        Raises:
            EngineDiedError: The engine died before it answered.
        """
        ...

    async def check_health(self) -> tuple[Wait, ...]:
        """What the worker waits for now.

        Raises:
            ActorDiedError: It is dead; the text says how it ended.
        """
        ...

    async def close(self) -> None:
        """End every process of the worker. May be called twice."""
        ...


class Trainer(Protocol):
    """The training engine: a few verbs, blind to reinforcement learning. Rows lie in the store.

    Life: ``start``, perhaps ``load``; then for each step ``prepare`` for each of its updates, and for each update
    ``forward_backward`` for each micro-batch and ``optim_step``; ``publish`` and ``save`` between steps; ``close``.
    """

    async def start(self) -> None:
        """Load the model; the optimiser is fresh."""
        ...

    async def prepare(self, batch: BatchRecord) -> None:
        """Read the batch's rows into the ranks and, where it says so, compute proximal log-probabilities.

        All batches of a step are prepared before its first update, so that the proximal policy is that of its start.
        """
        ...

    async def forward_backward(self, update: int, microbatch: Microbatch) -> StepStats:
        """Add the gradient of some rows of a prepared batch to the update's; returns sums over their loss tokens."""
        ...

    async def optim_step(self) -> StepStats:
        """Clip, apply and clear the gradient. Sums hold ``grad_norm`` (before the clip) and ``learning_rate``."""
        ...

    async def publish(self, number: int, *, incarnation: int) -> Publication:
        """Write the weights where engines read them, as publication ``number``."""
        ...

    async def canary(self) -> Canary:
        """What the weights say now of fixed tokens, the same at each call and in each process."""
        ...

    async def save(self, folder: str, *, step: int) -> None:
        """Begin to write a checkpoint of the present state; legal between updates."""
        ...

    async def flush(self) -> None:
        """Return once the checkpoint that was begun is whole on disk.

        Raises:
            RunFolderError: It could not be written.
        """
        ...

    async def load(self, folder: str) -> int:
        """Restore a checkpoint exactly; returns its step.

        Raises:
            RunFolderError: It is damaged, or of another model.
        """
        ...

    async def export(self, folder: str) -> None:
        """Write the model in Hugging Face format, whole or not at all."""
        ...

    async def check_health(self) -> tuple[Wait, ...]:
        """What the trainer is at now.

        Raises:
            ActorDiedError: It is dead; the text says how it ended.
        """
        ...

    async def close(self) -> None:
        """End every process and unlink every shared buffer of the trainer. May be called twice."""
        ...


class Environment(Protocol):
    """One attempt's world. Single-use: opened for a task and a seed, stepped, closed."""

    async def reset(self) -> Observation:
        """The first observation: the messages that the policy answers."""
        ...

    async def step(self, reply: Message) -> Observation:
        """The world's answer to a reply; ``is_final`` ends the episode."""
        ...

    async def close(self) -> None:
        """Give back everything that the attempt held."""
        ...


class Taskset(Protocol):
    """A source of tasks with a fixed, disjoint split, and the environment that each is attempted in."""

    @property
    def train(self) -> Sequence[Task]:
        """Tasks to train on."""
        ...

    @property
    def held_out(self) -> Sequence[Task]:
        """Tasks to evaluate on; no content occurs in both."""
        ...

    def open(self, task: Task, seed: int) -> Environment:
        """A fresh environment for one attempt. Members of a group share task and seed."""
        ...


class Grader(Protocol):
    """Judges an episode. It may see the task and the episode's messages, and nothing of the policy."""

    @property
    def name(self) -> str:
        """Name and a digest of the code ("numeric@1c9d22aa"), written into each verdict."""
        ...

    async def grade(self, task: Task, episode: Episode) -> Verdict:
        """The verdict. A failure of the grader itself is raised, or returned as ``Unscored``; it is never a number."""
        ...
