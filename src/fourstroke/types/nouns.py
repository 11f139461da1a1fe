"""The nouns: what crosses a boundary between rooms, each frozen and typed.

No noun has a field that means "not yet"; a thing that may or may not have happened is two nouns (a :data:`Verdict` is
``Scored``, ``Unscored`` or ``Tamper``, so that a failed grader cannot be mistaken for a score of zero). Arrays are
NumPy and are treated as frozen too.

Shape letters: ``T`` tokens of one span or row, ``G`` members of a group, ``B`` rows.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec
import numpy as np


class Noun(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all nouns: immutable, slotted, keyword-only. Written to bytes by :mod:`fourstroke.types.codec`."""


# --- tasks and messages ---------------------------------------------------------------------------------------------


class ToolCall(Noun, frozen=True, kw_only=True):
    """A call of a tool in an assistant's message; ``arguments`` is the JSON text exactly as the model wrote it.

    Example:
        >>> ToolCall(id="c1", name="forecast", arguments='{"city": "Oslo"}').name
        'forecast'
    """

    id: str
    name: str
    arguments: str


class Message(Noun, frozen=True, kw_only=True):
    """One turn of a conversation.

    Example:
        >>> Message(role="user", content="What is 3 + 4?").role
        'user'
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


class Observation(Noun, frozen=True, kw_only=True):
    """What an environment shows: the messages added since the last reply, and whether the episode is over.

    Example:
        >>> Observation(messages=(Message(role="user", content="What is 3 + 4?"),), is_final=False).is_final
        False
    """

    messages: tuple[Message, ...]
    is_final: bool


class Task(Noun, frozen=True, kw_only=True):
    """A problem to be attempted; ``id`` is a digest of its content, so equal problems have equal ids.

    Example:
        >>> Task(id="9f2c", prompt=(Message(role="user", content="What is 3 + 4?"),), answer="7").answer
        '7'
    """

    id: str
    prompt: tuple[Message, ...]
    answer: str


class Draw(Noun, frozen=True, kw_only=True):
    """The ledger's unit: the ``index``-th task of an epoch's order. Its ``seed`` fixes every sample drawn for it.

    Example:
        >>> Draw(epoch=0, index=12, task_id="9f2c", seed=7).key
        'e0000-i000012'
    """

    epoch: int
    index: int
    task_id: str
    seed: int

    @property
    def key(self) -> str:
        """Name of the draw in the ledger, in the logs and as the id of its group; sorts by admission."""
        return f"e{self.epoch:04d}-i{self.index:06d}"


class Assignment(Noun, frozen=True, kw_only=True):
    """A draw that a rollout worker is to turn into a graded group.

    ``admitted_version`` is the newest routable weight version when the draw took its slot. ``incarnation`` and
    ``attempt`` (from 0 in each incarnation) name this try, so that a late result can be told from the one awaited.

    Example:
        >>> task = Task(id="9f2c", prompt=(Message(role="user", content="What is 3 + 4?"),), answer="7")
        >>> Assignment(draw=Draw(epoch=0, index=12, task_id="9f2c", seed=7), task=task, num_samples=8,
        ...            admitted_version=3, incarnation=0, attempt=1).name
        'e0000-i000012, attempt 1'
    """

    draw: Draw
    task: Task
    num_samples: int
    admitted_version: int
    incarnation: int
    attempt: int

    @property
    def name(self) -> str:
        """For logs, waits and errors."""
        return f"{self.draw.key}, attempt {self.attempt}"


# --- sampling -------------------------------------------------------------------------------------------------------


class StopReason(StrEnum):
    """Why an episode (or one completion) ended. ``LENGTH`` is a cut, never a finish."""

    FINISHED = "finished"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


class SampleRequest(Noun, frozen=True, kw_only=True):
    """A request to an engine: token ids in, ``num_samples`` completions out.

    ``temperature`` is the only knob of the distribution: ``top_p``, ``top_k`` and ``min_p`` change the support and are
    refused for training, so an engine never sees them.

    Example:
        >>> SampleRequest(id="g1", prompt_ids=np.array([1, 2], np.int32), num_samples=8, max_tokens=24,
        ...               temperature=1.0, stop_ids=(2,), seed=7).num_samples
        8
    """

    id: str
    prompt_ids: np.ndarray  # int32 [T]
    num_samples: int
    max_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    seed: int


class VersionRun(Noun, frozen=True, kw_only=True):
    """``num_tokens`` consecutive tokens sampled under weight version ``version``.

    Example:
        >>> [VersionRun(version=3, num_tokens=4), VersionRun(version=4, num_tokens=3)][0].num_tokens
        4
    """

    version: int
    num_tokens: int


class Completion(Noun, frozen=True, kw_only=True):
    """What an engine sampled for one member of a request.

    ``ids`` holds every sampled token, the stop token included. ``logprobs`` are those of the distribution that was
    sampled: ``log_softmax(logits / temperature)`` at the sampled id. ``versions`` covers the tokens in order.

    Example:
        >>> Completion(ids=np.array([5, 2], np.int32), logprobs=np.array([-0.1, -0.2], np.float32),
        ...            versions=(VersionRun(version=0, num_tokens=2),), stop=StopReason.FINISHED, engine="vllm-0").stop
        <StopReason.FINISHED: 'finished'>
    """

    ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    versions: tuple[VersionRun, ...]
    stop: StopReason
    engine: str

    def __post_init__(self) -> None:
        num_tokens = len(self.ids)
        assert len(self.logprobs) == num_tokens, (len(self.logprobs), num_tokens)
        assert sum(run.num_tokens for run in self.versions) == num_tokens, (self.versions, num_tokens)


# --- episodes -------------------------------------------------------------------------------------------------------


class MaskReason(StrEnum):
    """Whether a token is trained on and, if not, why. Stored per span and, as ``ordinal``, per token."""

    SAMPLED = "sampled"
    PROMPT = "prompt"
    OBSERVATION = "observation"
    TRUNCATED = "truncated"
    SHARED = "shared"  # sampled once, trained on in another row of the same episode

    @property
    def ordinal(self) -> int:
        """Position in this enum: the value in ``Column.MASK_REASON``."""
        return list(MaskReason).index(self)


class Span(Noun, frozen=True, kw_only=True):
    """A run of tokens of one origin in an episode's prefix graph.

    ``parent`` is the position of the span that this one follows (-1 for a root), so that branches share prefixes. A
    span that was not sampled (``reason`` is not ``SAMPLED`` or ``TRUNCATED``) has empty ``logprobs`` and ``versions``.

    Example:
        >>> Span(parent=-1, ids=np.array([1, 2], np.int32), logprobs=np.empty(0, np.float32),
        ...      reason=MaskReason.PROMPT, versions=(), engine="").reason.value
        'prompt'
    """

    parent: int
    ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T], or [0] where the span was not sampled
    reason: MaskReason
    versions: tuple[VersionRun, ...]
    engine: str

    @property
    def is_sampled(self) -> bool:
        """Whether the policy sampled these tokens (trained on or masked afterwards)."""
        return self.reason in (MaskReason.SAMPLED, MaskReason.TRUNCATED)


class Timings(Noun, frozen=True, kw_only=True):
    """Seconds of the event loop's clock that an episode spent; ``generate_s`` is shared by the group's members.

    The cost of grading stands in the verdict.

    Example:
        >>> Timings(generate_s=1.5).generate_s
        1.5
    """

    generate_s: float


class Episode(Noun, frozen=True, kw_only=True):
    """One attempt at a task: spans as a prefix graph, why it ended, and the messages a grader may see.

    ``messages`` is the evidence: the conversation after the task's prompt, as text. Training never reads it.

    Example:
        >>> Episode(id="e0000-i000012.3", group="e0000-i000012", member=3, task_id="9f2c", attempt=0, spans=(),
        ...         stop=StopReason.FINISHED, messages=(Message(role="assistant", content="7"),),
        ...         timings=Timings(generate_s=1.5)).reply
        '7'
    """

    id: str
    group: str
    member: int
    task_id: str
    attempt: int
    spans: tuple[Span, ...]
    stop: StopReason
    messages: tuple[Message, ...]
    timings: Timings

    @property
    def reply(self) -> str:
        """Text of the last assistant message, empty if there is none."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled, over all spans."""
        return sum(len(span.ids) for span in self.spans if span.is_sampled)


class Scored(Noun, frozen=True, kw_only=True, tag="scored"):
    """The grader judged the episode. ``score`` is finite; ``components`` are named parts of it.

    Example:
        >>> Scored(score=1.0, components={"exact": 1.0}, reason="equal", grader="exact@1c9d", cost_s=0.0).score
        1.0
    """

    score: float
    components: dict[str, float]
    reason: str
    grader: str
    cost_s: float

    def __post_init__(self) -> None:
        if not np.isfinite(self.score):
            raise ValueError(f"score must be finite, got {self.score} from {self.grader}")


class Unscored(Noun, frozen=True, kw_only=True, tag="unscored"):
    """The grader, judge or environment failed: there is no score, and the episode trains nothing.

    Example:
        >>> Unscored(reason="timeout", detail="grader exact ran past 5 s", grader="exact@1c9d", cost_s=5.0).reason
        'timeout'
    """

    reason: str
    detail: str
    grader: str
    cost_s: float


class Tamper(Noun, frozen=True, kw_only=True, tag="tamper"):
    """The episode tried to change its own grading; it trains nothing and is counted apart.

    Example:
        >>> Tamper(reason="wrote to the grader's folder", grader="exact@1c9d", cost_s=0.0).reason
        "wrote to the grader's folder"
    """

    reason: str
    grader: str
    cost_s: float


Verdict = Scored | Unscored | Tamper


class GradedEpisode(Noun, frozen=True, kw_only=True):
    """An episode with its verdict.

    Example:
        >>> graded.is_scored  # doctest: +SKIP
        True
    """

    episode: Episode
    verdict: Verdict

    @property
    def is_scored(self) -> bool:
        """Whether there is a score to train on."""
        return isinstance(self.verdict, Scored)


class Group(Noun, frozen=True, kw_only=True):
    """The graded episodes of one draw (one task and seed), in member order. Groups go by id, never by position.

    ``admitted_version`` is the newest routable weight version when the draw took its slot; lag counts from it.

    Example:
        >>> group.scores_G  # doctest: +SKIP
        array([1., 0., 0.])
    """

    draw: Draw
    members: tuple[GradedEpisode, ...]
    admitted_version: int

    @property
    def id(self) -> str:
        """The draw's key."""
        return self.draw.key

    @property
    def scored(self) -> tuple[GradedEpisode, ...]:
        """The members that have a score."""
        return tuple(m for m in self.members if m.is_scored)

    @property
    def scores_G(self) -> np.ndarray:
        """float64 [G]: scores of the scored members only, in member order."""
        return np.array([m.verdict.score for m in self.members if isinstance(m.verdict, Scored)], dtype=np.float64)


# --- records: what the controller keeps of groups, while the payload lies in the store -------------------------------


class PayloadReference(Noun, frozen=True, kw_only=True):
    """Where a noun lies in the run's payload, and what its bytes must be.

    Attributes:
        segment: Number of the segment.
        offset: First byte.
        length: Number of bytes.
        digest: xxh3_64 of the bytes, 16 hexadecimal digits.

    Example:
        >>> PayloadReference(segment=0, offset=0, length=120, digest="0123456789abcdef").length
        120
    """

    segment: int
    offset: int
    length: int
    digest: str


class RowShape(Noun, frozen=True, kw_only=True):
    """Lengths of one training row of an episode: all that planning needs.

    Attributes:
        num_tokens: Tokens, prompt and all.
        num_loss_tokens: Tokens that are trained on.
        num_shared_tokens: Its first tokens that the row before it in its group begins with too; 0 for the first.

    Example:
        >>> RowShape(num_tokens=38, num_loss_tokens=12, num_shared_tokens=26).num_tokens
        38
    """

    num_tokens: int
    num_loss_tokens: int
    num_shared_tokens: int


class EpisodeRecord(Noun, frozen=True, kw_only=True):
    """What the controller keeps of a graded episode.

    Attributes:
        member: Position in the group.
        stop: Why it ended.
        verdict: The grader's.
        num_sampled_tokens: Tokens that the policy sampled.
        versions: Sampled tokens by weight version, in the order of sampling.
        rows: Its training rows; none where nothing was sampled.
        failure: What its environment failed of; empty unless ``stop`` is ``FAILED``.

    Example:
        >>> verdict = Unscored(reason="timeout", detail="5 s", grader="exact@1c9d", cost_s=5.0)
        >>> EpisodeRecord(member=0, stop=StopReason.FINISHED, verdict=verdict, num_sampled_tokens=12,
        ...               versions=(VersionRun(version=3, num_tokens=12),),
        ...               rows=(RowShape(num_tokens=38, num_loss_tokens=12, num_shared_tokens=26),),
        ...               failure="").is_scored
        False
    """

    member: int
    stop: StopReason
    verdict: Verdict
    num_sampled_tokens: int
    versions: tuple[VersionRun, ...]
    rows: tuple[RowShape, ...]
    failure: str

    @property
    def is_scored(self) -> bool:
        """Whether there is a score to train on."""
        return isinstance(self.verdict, Scored)


class GroupRecord(Noun, frozen=True, kw_only=True):
    """What the controller keeps of a graded group; the group itself lies at ``reference``.

    Example:
        >>> record.scores_G  # doctest: +SKIP
        array([1., 0., 0.])
    """

    draw: Draw
    admitted_version: int
    incarnation: int
    attempt: int
    episodes: tuple[EpisodeRecord, ...]
    reference: PayloadReference

    @property
    def id(self) -> str:
        """The draw's key."""
        return self.draw.key

    @property
    def scored(self) -> tuple[EpisodeRecord, ...]:
        """The members that have a score."""
        return tuple(episode for episode in self.episodes if episode.is_scored)

    @property
    def scores_G(self) -> np.ndarray:
        """float64 [G]: scores of the scored members only, in member order."""
        verdicts = [episode.verdict for episode in self.episodes]
        return np.array([verdict.score for verdict in verdicts if isinstance(verdict, Scored)], dtype=np.float64)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled, over all members."""
        return sum(episode.num_sampled_tokens for episode in self.episodes)

    @property
    def oldest_version(self) -> int:
        """The version at admission, or that of a token which is older still: from an engine that ought not to serve."""
        sampled = (run.version for episode in self.episodes for run in episode.versions)
        return min([self.admitted_version, *sampled])


class RefusedGroup(Noun, frozen=True, kw_only=True):
    """Why an assignment gives no group, now or at any other attempt.

    Example:
        >>> RefusedGroup(key="e0000-i000012", reason="does_not_fit", detail="a prompt of 900 tokens").reason
        'does_not_fit'
    """

    key: str
    reason: str
    detail: str


class RowRecord(Noun, frozen=True, kw_only=True):
    """One row of an optimiser batch: which row of which stored episode, and the two numbers that make it train.

    ``advantage`` and ``weight`` hold for each loss token of the row (see ``Column.WEIGHT``); ``num_shared_tokens`` is
    how many of its first tokens the row before it in the batch begins with too.

    Example:
        >>> RowRecord(group="e0000-i000012", member=3, row=0, num_tokens=38, num_loss_tokens=12,
        ...           num_shared_tokens=26, advantage=0.5, weight=0.01).id
        'e0000-i000012.3/0'
    """

    group: str
    member: int
    row: int
    num_tokens: int
    num_loss_tokens: int
    num_shared_tokens: int
    advantage: float
    weight: float

    @property
    def id(self) -> str:
        """Id of the row, that of the trajectory which it becomes in the rank."""
        return f"{self.group}.{self.member}/{self.row}"


class BatchRecord(Noun, frozen=True, kw_only=True):
    """An optimiser batch as the controller sends it; ranks read the groups out of the store.

    Attributes:
        step: Number of the training step.
        update: Which of the step's optimiser updates, from 0.
        references: Where each group of the batch lies, by its id.
        rows: All rows, those without gradient too.
        num_sequences: Rows of the whole update.
        num_loss_tokens: Loss tokens of the whole update.
        needs_proximal: Whether ``prepare`` must compute the proximal log-probabilities.

    Example:
        >>> BatchRecord(step=1, update=0, references={}, rows=(), num_sequences=0, num_loss_tokens=0,
        ...             needs_proximal=False).step
        1
    """

    step: int
    update: int
    references: dict[str, PayloadReference]
    rows: tuple[RowRecord, ...]
    num_sequences: int
    num_loss_tokens: int
    needs_proximal: bool


# --- training -------------------------------------------------------------------------------------------------------


class Column(StrEnum):
    """Columns of a trajectory; all have the row's length T. The value at t belongs to token t.

    ``LOSS_MASK`` is true where the token was sampled and is trained on; it follows position, never a token's id.
    ``WEIGHT`` is the token's share of the optimiser step's loss (see ``algorithms.aggregation``): the loss is the plain
    sum of ``WEIGHT * token loss``, so it cannot depend on how the batch was cut.
    """

    IDS = "ids"  # int32
    LOSS_MASK = "loss_mask"  # bool
    MASK_REASON = "mask_reason"  # int8, MaskReason.ordinal
    BEHAVIOUR_LOGPROBS = "behaviour_logprobs"  # float32, 0 where not sampled
    VERSIONS = "versions"  # int32, -1 where not sampled
    ADVANTAGES = "advantages"  # float32, 0 where not trained on
    WEIGHT = "weight"  # float32, 0 where not trained on
    PROXIMAL_LOGPROBS = "proximal_logprobs"  # float32; only after prepare


class Trajectory(Noun, frozen=True, kw_only=True):
    """A token row for training: typed columns of one length, with the ids of what it came from.

    Example:
        >>> Trajectory(id="e0-i1.0/0", group="e0-i1", episode="e0-i1.0",
        ...            columns={Column.IDS: np.array([1, 2], np.int32)}).num_tokens
        2
    """

    id: str
    group: str
    episode: str
    columns: dict[Column, np.ndarray]

    def __post_init__(self) -> None:
        lengths = {column.value: len(values) for column, values in self.columns.items()}
        assert len(set(lengths.values())) == 1, (self.id, lengths)

    def __getitem__(self, column: Column) -> np.ndarray:
        return self.columns[column]

    @property
    def num_tokens(self) -> int:
        """Length of the row, prompt and all."""
        return len(self.columns[Column.IDS])

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens that the loss counts."""
        return int(self.columns[Column.LOSS_MASK].sum())

    def with_columns(self, **named: np.ndarray) -> Trajectory:
        """A copy with columns added or replaced, by the lower-case name of the column."""
        added = {Column(name): values for name, values in named.items()}
        return msgspec.structs.replace(self, columns={**self.columns, **added})


class Batch(Noun, frozen=True, kw_only=True):
    """All rows of one optimiser step, with the step's global counts (rows without gradient are counted too).

    Example:
        >>> Batch(step=0, rows=(), num_sequences=0, num_loss_tokens=0).step
        0
    """

    step: int
    rows: tuple[Trajectory, ...]
    num_sequences: int
    num_loss_tokens: int


class Microbatch(Noun, frozen=True, kw_only=True):
    """Rows that go through the model together. Positions are into ``Batch.rows``.

    Example:
        >>> Microbatch(rows=(0, 3, 5)).rows
        (0, 3, 5)
    """

    rows: tuple[int, ...]


class StepStats(Noun, frozen=True, kw_only=True):
    """Sums that a trainer returns of a micro-batch or step, by metric name; the controller divides by stated counts.

    Example:
        >>> StepStats(sums={"loss": 0.5}, num_tokens=24).sums["loss"]
        0.5
    """

    sums: dict[str, float]
    num_tokens: int


# --- weights --------------------------------------------------------------------------------------------------------


class WeightVersion(Noun, frozen=True, kw_only=True):
    """Identity of a set of weights: which incarnation of the run, which publication, and the digest of its content.

    Example:
        >>> str(WeightVersion(incarnation=0, number=12, digest="a1b2c3d4e5f60718"))
        '0.12-a1b2c3d4'
    """

    incarnation: int
    number: int
    digest: str

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}-{self.digest[:8]}"


class TensorEntry(Noun, frozen=True, kw_only=True):
    """Where one tensor lies in a publication, and the digest of its name, dtype, shape and bytes.

    Attributes:
        name: In the checkpoint.
        dtype: Published type.
        shape: Of the tensor.
        offset: Where its bytes begin.
        size_bytes: How many they are.
        digest: Of name, dtype, shape and bytes.
        num_changed: Elements whose bits are not those that the same publisher wrote before; all at its first.

    Example:
        >>> TensorEntry(name="model.norm.weight", dtype="bfloat16", shape=(576,), offset=0, size_bytes=1152,
        ...             digest="00ff", num_changed=12).num_elements
        576
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    digest: str
    num_changed: int

    @property
    def num_elements(self) -> int:
        """How many numbers the tensor holds."""
        return math.prod(self.shape)


class Publication(Noun, frozen=True, kw_only=True):
    """The message that announces new weights: the version, where the bytes are, and what they must be.

    Example:
        >>> Publication(version=WeightVersion(incarnation=0, number=1, digest="ab"), path="/dev/shm/x",
        ...             size_bytes=0, tensors=()).version.number
        1
    """

    version: WeightVersion
    path: str
    size_bytes: int
    tensors: tuple[TensorEntry, ...]


class Canary(Noun, frozen=True, kw_only=True):
    """Fixed tokens with what a model says of them: two models that agree here hold the same weights.

    Attributes:
        ids_BT: int32 [rows, tokens].
        logprobs_BT: float32 [rows, tokens - 1], of each token but the first given those before it, at temperature 1.

    Example:
        >>> Canary(ids_BT=np.array([[5, 6]], np.int32), logprobs_BT=np.array([[-0.5]], np.float32)).num_rows
        1
    """

    ids_BT: np.ndarray
    logprobs_BT: np.ndarray

    @property
    def num_rows(self) -> int:
        """How many rows; none says nothing."""
        return len(self.ids_BT)


# --- waits ----------------------------------------------------------------------------------------------------------


class Wait(Noun, frozen=True, kw_only=True):
    """One wait that goes on.

    Attributes:
        part: Who waits ("trainer", "worker-0").
        what: What for, so that "waits for ..." reads as a sentence.
        waited_s: Seconds so far.
        deadline_s: Seconds after which somebody decides; 0 where the caller of the part has the deadline.

    Example:
        >>> Wait(part="batch", what="the groups of step 3", waited_s=12.0, deadline_s=600.0).part
        'batch'
    """

    part: str
    what: str
    waited_s: float
    deadline_s: float


# --- estimates ------------------------------------------------------------------------------------------------------


class Estimate(Noun, frozen=True, kw_only=True):
    """A mean over tasks with its 95 % interval, clustered by task.

    Example:
        >>> Estimate(mean=0.5, low=0.4, high=0.6, num_tasks=200, num_samples=800).num_tasks
        200
    """

    mean: float
    low: float
    high: float
    num_tasks: int
    num_samples: int
