"""The sections of a run's configuration. Frozen; unknown keys are refused; each field says its unit.

A field stands here only if a part of the run reads it (``tests/cases/test_s28`` holds that).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fourstroke.config.bundles import BUNDLES
from fourstroke.config.references import Reference

DType = Literal["bfloat16", "float32"]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        """``learning_rate: true`` is no number, although Python would take it for 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("truth_value", "a truth value cannot stand here")
        return value


class ModelConfig(Section):
    """Which model is trained."""

    name: str = Field("smollm2-135m-instruct", description="Catalogue name, Hugging Face id, or path of a folder.")


class TaskConfig(Section):
    """Where tasks come from."""

    use: Reference = Field(
        "fourstroke.environments.arithmetic:arithmetic", description="module:function that returns a Taskset."
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of `use`.")


class GraderConfig(Section):
    """How an episode is judged."""

    use: Reference = Field("fourstroke.rewards.verifiers:numeric", description="module:function that returns a Grader.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of `use`.")
    num_processes: int = Field(1, ge=1, le=64, description="Grader processes; one past its deadline is killed.")


class RolloutConfig(Section):
    """How a step's episodes are sampled."""

    groups_per_step: int = Field(16, ge=1, description="Groups (prompts) in a training step, P.")
    group_size: int = Field(8, ge=1, description="Episodes of a group, G.")
    max_tokens: int = Field(256, ge=1, description="Longest reply, in tokens; a longer one is cut.")
    temperature: float = Field(1.0, ge=0.01, le=2, description="Sampling temperature; the trainer divides by it too.")
    ignore_eos: bool = Field(False, description="Replies run on to max_tokens whatever they say: for timing.")
    staleness: int = Field(
        0, ge=0, le=64, description="Versions that a group may lag behind the weights that train it, S; 0: synchronous."
    )
    window: int = Field(
        1, ge=1, description="Groups, W, of which a finished one may overtake unfinished older ones; 1: strict order."
    )
    min_scored: int = Field(2, ge=1, description="A group with fewer scored members is dropped, and counted.")
    max_retries: int = Field(1, ge=0, le=10, description="Times that a group below `min_scored` is rolled again.")
    num_workers: int = Field(1, ge=1, le=1024, description="Processes that run environments and graders.")
    max_drops_in_a_row: int = Field(32, ge=1, description="Stop the run when so many draws in a row were dropped.")


class AlgorithmConfig(Section):
    """The terms of the objective. `name` fills in a bundle's terms; single ones may be set beside it."""

    name: str = Field("grpo", description="Bundle: " + ", ".join(BUNDLES) + ".")
    advantage: Literal[
        "group_standardised",
        "group_centred",
        "group_centred_batch_scaled",
        "batch_standardised",
        "group_centred_batch_standardised",
        "leave_one_out",
        "leave_one_out_standardised",
        "length_weighted_baseline",
        "best_of_group",
        "pass_at_k",
        "decoupled",
    ] = Field(description="Baseline and scale of rewards.")
    pass_k: int = Field(4, ge=2, description="k of advantage = pass_at_k.")
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = Field(
        description="Weight of a token: 1/tokens of the step; 1/(sequences * its length); 1/sequences; "
        "1/(sequences * max_tokens)."
    )
    overlong_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Last share of max_tokens, in which a reply's score falls by up to 1; 0: none.",
    )
    mask_truncated: bool = Field(False, description="Replies cut by max_tokens count in baselines, but train nothing.")
    clip_low: float = Field(0.2, ge=0, le=1, description="Ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="Ratio is clipped above at 1 + clip_high.")
    dual_clip: float | None = Field(None, gt=1, description="Bound on the loss of a negative advantage, or null.")
    gate_positive: float = Field(1.0, gt=0, description="Steepness of sapo's gate where the advantage is positive.")
    gate_negative: float = Field(1.05, gt=0, description="The same where it is negative.")
    divergence: Literal["tv", "kl"] = Field("tv", description="dppo's distance: total variation or KL, of one token.")
    divergence_limit: float = Field(0.2, gt=0, description="Distance from the sampling policy at which dppo holds.")
    quadratic_strength: float = Field(0.05, gt=0, description="Strength of dro's square.")
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of an entropy bonus; 0: none.")
    correction: Literal["none", "token", "sequence", "geometric"] = Field(
        description="Truncated importance weight exp(proximal - behaviour), by token, sequence or geometric mean."
    )
    correction_cap: float = Field(ge=1, description="Largest importance weight of the correction.")
    rejection: Literal["none", "token", "sequence", "geometric"] = Field(
        "none", description="The ratio for which tokens or whole sequences train nothing when it leaves the band."
    )
    rejection_low: float = Field(0.0, ge=0, le=1, description="Lower end of the band of `rejection`.")
    rejection_high: float | None = Field(None, ge=1, description="Upper end of the band of `rejection`; null: none.")
    updates_per_step: int = Field(1, ge=1, description="Optimiser updates that a step's groups are divided into.")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_bundle(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"name": values}
        if isinstance(values, dict):
            name = values.get("name", "grpo")
            if name not in BUNDLES:
                raise PydanticCustomError("no_bundle", "bundles are {names}", {"names": ", ".join(BUNDLES)})
            return {**BUNDLES[name].terms, **values}
        return values


class TrainerConfig(Section):
    """How gradients are computed and applied. Master weights are fp32."""

    compute_dtype: DType = Field("bfloat16", description="Type of the forward and backward pass.")
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear"] = Field(
        "constant", description="Rate after the warm-up: constant, or falling linearly to 0 after the last update."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimiser updates over which the rate rises linearly from 0.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the second moment.")
    epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient is scaled down to this global norm.")
    microbatch_tokens: int = Field(4096, ge=1, description="Most tokens in a micro-batch, a shared beginning once.")
    num_threads: int | None = Field(None, ge=1, description="CPU threads; null takes all cores.")
    max_mismatch: float | None = Field(
        None, gt=0, description="Stop when mean |log ratio| of trainer to engine passes this at a step; null: by dtype."
    )


class EngineConfig(Section):
    """The inference engine (vLLM)."""

    dtype: DType = Field("bfloat16", description="Type of the engine's weights and of each publication.")
    max_model_len: int = Field(1024, ge=2, description="Context: prompt and reply together, in tokens.")
    max_num_seqs: int = Field(128, ge=1, description="Most sequences that are decoded together.")
    kv_cache_gib: float = Field(1.0, gt=0, description="Memory for the key-value cache on CPU, in GiB.")
    gpu_memory_fraction: float = Field(0.5, gt=0, lt=1, description="Share of a GPU's memory that the engine takes.")
    num_threads: int | None = Field(None, ge=1, description="CPU threads; null takes all cores.")
    count: int = Field(1, ge=1, description="Engines, each with the whole model.")
    landing: Literal["keep", "keep_kv", "drain", "abort"] = Field(
        "keep",
        description="What new weights do to running requests: recompute their cache; keep the old cache; let them "
        "finish first; cut them and go on from the tokens that they have.",
    )
    is_eager: bool = Field(True, description="Run without compilation: starts in 15 s rather than a minute.")


class EvaluationConfig(Section):
    """Held-out evaluation, at the training temperature, with the training runner and grader."""

    before: bool = Field(True, description="Evaluate before the first step.")
    after: bool = Field(True, description="Evaluate after the last step.")
    num_tasks: int | None = Field(None, ge=2, description="Held-out tasks to use, in the split's order; null: all.")
    samples_per_task: int = Field(4, ge=1, description="Episodes for each task, n.")
    pass_at: tuple[int, ...] = Field((1,), description="Values of k for the unbiased pass@k and pass^k; none above n.")


class CheckpointConfig(Section):
    """Checkpoints that a run resumes from exactly; the last step always has one."""

    every_steps: int = Field(10, ge=1, description="Steps between two checkpoints.")
    keep: int = Field(2, ge=1, description="Newest checkpoints that are kept.")


class SupervisionConfig(Section):
    """What a run survives without a person."""

    max_replacements: int = Field(3, ge=0, description="Dead engines, trainers and workers replaced before it stops.")
    max_attempts: int = Field(3, ge=1, description="Tries of a group that was lost or late (not: badly scored).")


class DeadlinesConfig(Section):
    """Seconds after which a named wait becomes a named error."""

    start_s: float = Field(600.0, gt=0, description="Engines, workers and trainer to be ready.")
    group_s: float = Field(600.0, gt=0, description="A group to be sampled and graded; then it is tried again.")
    grade_s: float = Field(30.0, gt=0, description="One episode to be graded, from when its grading begins.")
    train_s: float = Field(1800.0, gt=0, description="One verb of the trainer.")
    evaluate_s: float = Field(3600.0, gt=0, description="A whole evaluation.")
    save_s: float = Field(600.0, gt=0, description="A checkpoint to be written.")
    publish_s: float = Field(300.0, gt=0, description="A publication to land on every engine.")
    health_s: float = Field(1.0, gt=0, description="Between two looks at whether engines, workers and trainer live.")
    answer_s: float = Field(60.0, gt=0, description="A part to answer whether it lives; one that does not is replaced.")


class SinksConfig(Section):
    """Copies of a run's numbers for other tools. The run folder has all of them in any case."""

    use: tuple[Literal["tensorboard", "wandb", "mlflow", "prometheus"], ...] = Field(
        (), description="Tools that get a copy; each needs its library."
    )
    project: str = Field("fourstroke", min_length=1, description="Project of W&B, experiment of MLflow.")
    wandb_mode: Literal["offline", "online"] = Field(
        "offline", description="Whether W&B uploads while the run goes, or leaves files for `wandb sync`."
    )
    mlflow_uri: str | None = Field(
        None,
        description="MLflow's tracking server (http://...) or database (sqlite:///...); it must be set for mlflow.",
    )
    prometheus_port: int = Field(
        9464, ge=0, lt=2**16, description="Port of 127.0.0.1 at which Prometheus may fetch; 0 takes a free one."
    )


class RunConfig(Section):
    """Everything that decides a run.

    Example:
        >>> RunConfig().algorithm.clip_high
        0.28
    """

    name: str = Field("run", pattern=r"^[a-z0-9][a-z0-9._-]*$", description="Goes into the run folder's name.")
    runs_dir: str = Field("runs", description="Folder that holds run folders.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of the order of tasks and of all sampling.")
    num_steps: int = Field(100, ge=1, description="Training steps.")
    deterministic: bool = Field(
        False, description="Equal bit for bit on one type of machine, through kills and resumes; staleness must be 0."
    )
    model: ModelConfig = ModelConfig()
    tasks: TaskConfig = TaskConfig()
    grader: GraderConfig = GraderConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig.model_validate({"name": "grpo"})
    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    sinks: SinksConfig = SinksConfig()
