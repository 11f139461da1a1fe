"""What a whole run on fakes needs beside engine and trainer, and a tiny model for tests with real parts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fourstroke.config import RunConfig, process_settings
from fourstroke.engines.router import Router
from fourstroke.engines.vllm import CHECKPOINT, REPLACEMENT
from fourstroke.errors import ActorDiedError
from fourstroke.observability import Event, Waits
from fourstroke.orchestration.controller import Outlets
from fourstroke.orchestration.faults import work_under_watch
from fourstroke.orchestration.incarnations import Incarnations, assemble
from fourstroke.orchestration.supervision import Supervisor
from fourstroke.orchestration.training_run import PreparedRun, Site
from fourstroke.orchestration.watch import Watch
from fourstroke.rollout import GroupRunner, RolloutWorker
from fourstroke.store import Ledger, PayloadWriter, RunFolder
from fourstroke.store.checkpoints import checkpoint_path, retain
from fourstroke.testing.engine import FakeEngine, FakeEngineSettings
from fourstroke.testing.environment import InlineGraders
from fourstroke.testing.trainer import FakeTrainer
from fourstroke.types import (
    Assignment,
    Canary,
    Engine,
    Grader,
    GroupRecord,
    Message,
    RefusedGroup,
    Task,
    Taskset,
    Wait,
)


class FakeRenderer:
    """A tokenizer of single characters: a token's id is its code point, and 0 ends a reply."""

    stop_ids: tuple[int, ...] = (0,)

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 [T]: the characters of all messages."""
        return np.array([ord(char) for message in messages for char in message.content], dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The characters, without the stop token."""
        return "".join(chr(int(i)) for i in ids if i != 0)


class FakeParts:
    """Fakes in the driver's process behind ``training_run.Makers``: whole runs in virtual time.

    Args:
        taskset: Where environments come from.
        grader: Grades.
        engine: Settings of the engines.
        trainers: Trainers in the order in which they are made; when none is left, further ones are plain.

    Attributes:
        engines: Every engine made, by name.
        made_trainers: Every trainer made.
        made_workers: Every worker made, by name.
    """

    def __init__(
        self,
        *,
        taskset: Taskset,
        grader: Grader,
        engine: FakeEngineSettings | None = None,
        trainers: Sequence[FakeTrainer] = (),
    ) -> None:
        self._taskset = taskset
        self._grader = grader
        self._settings = engine or FakeEngineSettings(vocab_size=128, max_model_len=64)
        self._trainers = list(trainers)
        self.engines: dict[str, FakeEngine] = {}
        self.made_trainers: list[FakeTrainer] = []
        self.made_workers: dict[str, FakeWorker] = {}

    def open(self) -> None:
        """Nothing to start."""

    def check_health(self) -> None:
        """Always well."""

    def engine(self, site: Site, name: str, is_replacement: bool) -> FakeEngine:
        """A fake engine; only the first of the settings' deaths happens."""
        settings = dataclasses.replace(self._settings, landing=site.config.engine.landing)
        if self.engines:
            settings = dataclasses.replace(settings, dies_at_request=None)
        self.engines[name] = FakeEngine(settings, name=name, held=REPLACEMENT if is_replacement else CHECKPOINT)
        return self.engines[name]

    def trainer(self, site: Site) -> FakeTrainer:
        """The next trainer."""
        del site
        self.made_trainers.append(self._trainers.pop(0) if self._trainers else FakeTrainer(canary=self._canary))
        return self.made_trainers[-1]

    def _canary(self, version: int) -> Canary:
        """What the engines say of four tokens, so that trainers without a distribution agree with them."""
        return FakeEngine(self._settings).scored(np.array([[1, 2, 3, 4]], dtype=np.int32), version=version)

    def worker(self, site: Site, name: str) -> FakeWorker:
        """A real worker of the driver's process, which can be killed."""
        self.made_workers[name] = FakeWorker(
            name, config=site.config, taskset=self._taskset, grader=self._grader, payload_dir=site.payload_dir
        )
        return self.made_workers[name]

    def close(self) -> None:
        """Nothing to end."""


class FakeWorker(RolloutWorker):
    """The real worker, in the driver's process, with inline graders and a tokenizer of characters."""

    def __init__(self, name: str, *, config: RunConfig, taskset: Taskset, grader: Grader, payload_dir: Path) -> None:
        router, waits = Router(), Waits(name)
        runner = GroupRunner(
            config,
            taskset=taskset,
            graders=InlineGraders(grader, timeout_s=config.deadlines.grade_s),
            sampler=router,
            renderer=FakeRenderer(),
            waits=waits,
        )
        super().__init__(name, runner=runner, router=router, payload=PayloadWriter(payload_dir), waits=waits)
        self._death = asyncio.Event()

    def kill(self) -> None:
        """Die now, as a killed process does: every call that waits fails."""
        self._death.set()

    async def route(self, engines: Sequence[Engine]) -> None:
        """As the real one, while it lives."""
        self._check_alive()
        await super().route(engines)

    async def run(
        self, assignments: Sequence[Assignment], *, is_together: bool
    ) -> tuple[GroupRecord | RefusedGroup, ...]:
        """As the real one, while it lives."""
        self._check_alive()
        work = asyncio.ensure_future(super().run(assignments, is_together=is_together))
        death = asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
            self._check_alive()
            return await work
        finally:
            work.cancel()
            death.cancel()
            await asyncio.gather(work, death, return_exceptions=True)

    async def check_health(self) -> tuple[Wait, ...]:
        """As the real one, while it lives."""
        self._check_alive()
        return await super().check_health()

    def _check_alive(self) -> None:
        if self._death.is_set():
            raise ActorDiedError(f"{self.name} (process 2) is gone: signal 9; its log is none")


class FakeRun:
    """The real controller, watch, fleet, pool and ledger around fakes: one incarnation after another in one folder.

    Args:
        config: The run's.
        folder: Holds the ledger, the payload and the checkpoints.
        parts: The fakes.
        on_step: Takes a finished step's number and record.
        on_event: Takes an event.

    Example:
        >>> async with FakeRun(config, folder, parts=parts).started() as run:  # doctest: +SKIP
        ...     await run.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        parts: FakeParts,
        on_step: Callable[[int, dict[str, float]], None] = lambda _step, _record: None,
        on_event: Callable[[Event], None] = lambda _event: None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._on_step = on_step
        self._on_event = on_event
        (folder / "payload").mkdir(exist_ok=True)
        settings = process_settings()
        self._site = Site(
            config=config,
            settings=settings,
            model_path=folder,
            logs_dir=folder,
            payload_dir=folder / "payload",
        )
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.crew = assemble(
            config,
            ledger=self.ledger,
            supervisor=Supervisor(config.supervision),
            make_engine=lambda name, is_replacement: parts.engine(self._site, name, is_replacement),
            make_worker=lambda name: parts.worker(self._site, name),
            make_trainer=lambda: parts.trainer(self._site),
        )

    @asynccontextmanager
    async def started(self) -> AsyncIterator[FakeRun]:
        """Start the parts, and end them."""
        crew = self.crew
        with contextlib.closing(self.ledger):
            try:
                await asyncio.gather(crew.workers.start(), crew.fleet.start(), crew.trainer.start())
                yield self
            finally:
                await asyncio.gather(crew.workers.close(), crew.fleet.close(), crew.trainer.close())

    async def train(self, tasks: Sequence[Task]) -> None:
        """One incarnation, under the watch."""
        checkpoints, config, crew = self._folder / "checkpoints", self._config, self.crew
        outlets = Outlets(
            on_step=self._on_step,
            on_event=self._on_event,
            checkpoint_path=lambda number: checkpoint_path(checkpoints, step=number),
            on_checkpoint=lambda _: retain(checkpoints, keep=config.checkpoint.keep),
            origin_s=0.0,
        )
        incarnations = Incarnations(
            config,
            tasks=tasks,
            crew=crew,
            outlets=outlets,
            checkpoints_dir=checkpoints,
            waits=Waits("run"),
            note=lambda _text: None,
        )
        watch = Watch(
            config, fleet=crew.fleet, workers=crew.workers, supervisor=crew.supervisor, tell=lambda *_a, **_f: None
        )
        await work_under_watch(incarnations.run_one("test"), watch.run())


def prepared_on_fakes(folder: RunFolder, config: RunConfig, *, taskset: Taskset) -> PreparedRun:
    """What ``prepare_run`` would give, for parts that need neither a model nor much of the machine."""
    return PreparedRun(
        config=config,
        settings=process_settings(),
        taskset=taskset,
        model_path=folder.path,
        folder=folder,
    )


class SilentReporter:
    """Keeps what a person would have been told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.records: list[Mapping[str, float]] = []
        self.notes: list[str] = []

    def phase(self, name: str, *, total: int) -> None:
        """Keep the phase's name."""
        assert total >= 0, (name, total)
        self.phases.append(name)

    def advance(self, done: int) -> None:
        """Nothing to keep."""

    def step(self, step: int, *, total: int, record: Mapping[str, float], eta_s: float | None) -> None:
        """Keep the record."""
        assert step <= total, (step, total, eta_s)
        self.records.append(record)

    def note(self, text: str) -> None:
        """Keep the text."""
        self.notes.append(text)

    def summary(self, lines: Sequence[tuple[str, str]]) -> None:
        """Keep the lines."""
        self.notes += [f"{name}: {value}" for name, value in lines]

    def close(self) -> None:
        """Nothing to give back."""


def tiny_model(folder: Path, *, width: int = 128) -> Path:
    """A folder with a random two-layer Llama and a tokenizer of bytes, in Hugging Face format.

    257 tokens: the bytes, and ``<|end|>`` (256), which ends a turn and pads. Seeded, so that two calls give one model.

    Args:
        folder: Where; made if it is missing.
        width: Of the hidden and the inner layers: 128 gives 0.2 million parameters, 384 gives 1.9 million.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=257,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|end|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    fast.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return fast
