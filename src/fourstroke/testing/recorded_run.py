"""A run folder as a run would have left it, without a run: for what reads run folders, in tests and at scale."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from fourstroke.config import load_config
from fourstroke.evaluation import EvaluationReport, clustered_estimate
from fourstroke.observability import Event, EventKind, WaitsReport, utc_now
from fourstroke.store import Ledger, PayloadWriter, RunFolder, RunStatus, Summary
from fourstroke.testing.episodes import make_record, prompt_span
from fourstroke.types import (
    Draw,
    Episode,
    GradedEpisode,
    Group,
    MaskReason,
    Message,
    Scored,
    Span,
    StopReason,
    Tamper,
    Timings,
    Unscored,
    Verdict,
    VersionRun,
    Wait,
)

# Each so many-th group is dropped, and each so many-th verdict is no score.
_DROPPED_EVERY, _UNSCORED_EVERY, _TAMPER_EVERY = 9, 11, 23


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What to record.

    Attributes:
        name: Of the run.
        num_steps: Steps trained.
        groups_per_step: Groups that each trained.
        group_size: Members of a group.
        num_tokens: Sampled tokens of the longest reply.
        seed: Of everything that is drawn.
        replies: Texts of the replies, taken in turn; empty: made of words.
        is_ended: Whether it has a summary; if not, ``pid`` seems to train it.
        pid: The process in ``waits.json``.
    """

    name: str = "recorded"
    num_steps: int = 8
    groups_per_step: int = 4
    group_size: int = 4
    num_tokens: int = 24
    seed: int = 0
    replies: Sequence[str] = ()
    is_ended: bool = True
    pid: int = 1


def record_run(runs_dir: Path, recorded: RecordedRun) -> Path:
    """Write the folder and return its path.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as runs:
        ...     record_run(Path(runs), RecordedRun(name="demo", num_steps=1)).name.endswith("-demo")
        True
    """
    config = load_config(
        {
            "name": recorded.name,
            "runs_dir": str(runs_dir),
            "num_steps": recorded.num_steps,
            "rollout": {
                "groups_per_step": recorded.groups_per_step,
                "group_size": recorded.group_size,
                "staleness": 1,
            },
        }
    )
    folder = RunFolder.create(config, now=utc_now())
    with contextlib.closing(folder), contextlib.closing(Ledger(folder.ledger_path)) as ledger:
        payload = PayloadWriter(folder.payload_dir)
        with contextlib.closing(payload):
            _Recorder(recorded, folder=folder, ledger=ledger, payload=payload).record()
    return folder.path


class _Recorder:
    """Writes one run, step by step."""

    def __init__(self, recorded: RecordedRun, *, folder: RunFolder, ledger: Ledger, payload: PayloadWriter) -> None:
        self._recorded, self._folder, self._ledger, self._payload = recorded, folder, ledger, payload
        self._random = np.random.default_rng(recorded.seed)
        self._count = itertools.count()
        self._index = itertools.count()

    def record(self) -> None:
        self._event(EventKind.RUN_STARTED, 0.0, run=self._folder.path.name)
        self._ledger.open_incarnation(from_step=0, reason="the run began")
        self._event(EventKind.INCARNATION_OPENED, 1.0, incarnation=0, step=0, reason="the run began")
        self._evaluate("before", version=0, share=0.2)
        for step in range(1, self._recorded.num_steps + 1):
            self._step(step)
        self._evaluate("after", version=self._recorded.num_steps, share=0.7)
        wait = Wait(part="worker-0", what="request e0000-i000001 to be sampled", waited_s=1.5, deadline_s=600.0)
        report = WaitsReport(
            written_unix=0.0, pid=self._recorded.pid, phase="train", step=self._recorded.num_steps, waits=(wait,)
        )
        self._folder.write_waits(report)
        if self._recorded.is_ended:
            self._folder.write_summary(self._summary())
            self._event(EventKind.RUN_ENDED, 10.0 * self._recorded.num_steps, status="finished", reason="")

    def _step(self, step: int) -> None:
        version = step - 1
        keys: list[str] = []
        scores: list[float] = []
        while len(keys) < self._recorded.groups_per_step:
            index = next(self._index)
            draw = Draw(epoch=0, index=index, task_id=f"task{index % 40:04d}", seed=index)
            admitted = max(0, version - index % 2)
            self._ledger.admit(draw, version=admitted)
            if index % _DROPPED_EVERY == _DROPPED_EVERY - 1:
                self._ledger.mark_dropped(draw.key, reason="too_few_scored", step=step)
                self._event(EventKind.GROUP_DROPPED, 10.0 * step, group=draw.key, reason="too_few_scored")
                continue
            group = self._group(draw, versions=(admitted, version), skill=step / self._recorded.num_steps)
            record = make_record(group, reference=self._payload.append(group))
            self._ledger.begin_attempt(
                draw.key, incarnation=0, attempt=0, version=admitted, num_episodes=len(record.episodes)
            )
            self._ledger.receive(record)
            keys.append(draw.key)
            scores += record.scores_G.tolist()
        self._ledger.mark_trained(keys, step=step, version=version)
        self._metrics(step, scores)
        self._event(EventKind.WEIGHTS_LANDED, 10.0 * step, step=step, version=f"0.{step}-{step:08x}")

    def _group(self, draw: Draw, *, versions: tuple[int, int], skill: float) -> Group:
        members = tuple(
            self._member(draw, member=member, versions=versions, skill=skill)
            for member in range(self._recorded.group_size)
        )
        return Group(draw=draw, members=members, admitted_version=versions[0])

    def _member(self, draw: Draw, *, member: int, versions: tuple[int, int], skill: float) -> GradedEpisode:
        number = next(self._count)
        replies = self._recorded.replies
        reply = replies[number % len(replies)] if replies else f"The sum of {draw.index} and {member} is {number}."
        num_tokens = int(self._random.integers(2, self._recorded.num_tokens + 1))
        prompt = [ord(char) for char in f"What is {draw.index} + {member}?"]
        ids = np.array([ord(char) for char in reply[:num_tokens].ljust(num_tokens)], np.int32)
        # New weights landed half-way, unless the group was admitted under the ones that it is trained on.
        cut = num_tokens // 2
        runs: tuple[VersionRun, ...] = (
            VersionRun(version=versions[0], num_tokens=cut),
            VersionRun(version=versions[1], num_tokens=num_tokens - cut),
        )
        if versions[0] == versions[1]:
            runs = (VersionRun(version=versions[0], num_tokens=num_tokens),)
        spans = (
            prompt_span(prompt),
            Span(
                parent=0,
                ids=ids,
                logprobs=-self._random.exponential(0.8, num_tokens).astype(np.float32),
                reason=MaskReason.SAMPLED,
                versions=runs,
                engine="vllm-0",
            ),
        )
        episode = Episode(
            id=f"{draw.key}.{member}",
            group=draw.key,
            member=member,
            task_id=draw.task_id,
            attempt=0,
            spans=spans,
            stop=StopReason.LENGTH if num_tokens == self._recorded.num_tokens else StopReason.FINISHED,
            messages=(Message(role="assistant", content=reply),),
            timings=Timings(generate_s=1.5),
        )
        return GradedEpisode(episode=episode, verdict=self._verdict(number, skill=skill))

    def _verdict(self, number: int, *, skill: float) -> Verdict:
        if number % _TAMPER_EVERY == _TAMPER_EVERY - 1:
            return Tamper(reason="wrote to the grader's folder", grader="exact@1c9d", cost_s=0.001)
        if number % _UNSCORED_EVERY == _UNSCORED_EVERY - 1:
            return Unscored(reason="timeout", detail="grader exact ran past 5 s", grader="exact@1c9d", cost_s=5.0)
        score = float(self._random.random() < skill)
        reason = "equal" if score else "another number"
        return Scored(score=score, components={"exact": score}, reason=reason, grader="exact@1c9d", cost_s=0.001)

    def _metrics(self, step: int, scores: Sequence[float]) -> None:
        self._folder.append_metrics(
            {
                "step": step,
                "reward/grade/score_mean": float(np.mean(scores)) if scores else float("nan"),
                "train/loss/loss": float(self._random.normal(0, 0.01)),
                "train/optim/grad_norm": float(self._random.gamma(2.0)),
                "weights/canary/difference": float(self._random.gamma(2.0, 1e-3)),
                "time/step_s": 10.0,
                "time/rollout_s": 6.0 + float(self._random.random()),
                "time/train_s": 3.0,
                "time/publish_s": 0.4,
                "time/wait_s": 5.0,
            }
        )

    def _evaluate(self, name: str, *, version: int, share: float) -> None:
        scores = {f"held{n:04d}": (self._random.random(4) < share).astype(float).tolist() for n in range(20)}
        report = EvaluationReport(
            name=name,
            version=version,
            estimate=clustered_estimate([np.array(values) for values in scores.values()]),
            pass_at={1: share},
            num_tasks_without_score=0,
            num_unscored=0,
            num_tampered=0,
            num_failed=0,
            num_truncated=0,
            mean_tokens=8.0,
            seconds=1.0,
            scores=scores,
        )
        (self._folder.evaluations_dir / f"{name}.json").write_bytes(msgspec.json.encode(report))

    def _summary(self) -> Summary:
        return Summary(
            name=self._recorded.name,
            run_folder=str(self._folder.path),
            status=RunStatus.FINISHED,
            reason="",
            before=None,
            after=None,
            train_seconds=10.0 * self._recorded.num_steps,
            total_seconds=10.0 * self._recorded.num_steps + 60,
            num_steps=self._recorded.num_steps,
            peak_memory_bytes=5 * 10**9,
        )

    def _event(self, kind: EventKind, time_s: float, **fields: str | float) -> None:
        self._folder.append_event(Event(kind=kind, time_s=time_s, fields=fields))
