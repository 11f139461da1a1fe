"""Where parts run. Classes are plain Python; this file alone makes processes of them and reaches them.

The trainer gets a process of its own, so that its work never holds up the event loop and can be killed: the driver
talks to it over a socket pair in frames (``types.frames``), one verb at a time.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fourstroke import errors
from fourstroke.config import RunConfig
from fourstroke.errors import ActorDiedError, FourstrokeError
from fourstroke.types import Batch, Microbatch, Publication, StepStats, decode, encode
from fourstroke.types.frames import pack, read_frame
from fourstroke.types.nouns import Noun

_GRACE_S = 2.0

# OpenMP threads that wait must sleep: spinning ones starve whoever else has the core (four times slower beside one busy
# process).
_TRAINER_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE"}

NounT = TypeVar("NounT", bound=Noun)


class TrainerProcess:
    """A trainer in a process of its own, behind the ``Trainer`` protocol.

    Every verb raises what the trainer raised (an error of our tree), or ``ActorDiedError`` that says how the process
    ended.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        model_path: Path,
        publication_path: Path,
        log_path: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._config = config
        self._environment = environment
        self._model_path = model_path
        self._publication_path = publication_path
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the process and load the model."""
        ours, theirs = socket.socketpair()
        with theirs, self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "fourstroke.orchestration.trainer_process",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env={**_TRAINER_VARIABLES, **self._environment},
            )
        # The default limit of a stream's buffer would cut frames that hold whole batches.
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 26)
        paths = [str(self._model_path).encode(), str(self._publication_path).encode()]
        self._writer.write(pack("config", [self._config.model_dump_json().encode(), *paths]))
        await self._call("start", [])

    async def prepare(self, batch: Batch) -> Batch:
        """The batch with proximal log-probabilities."""
        return _only(await self._call("prepare", [encode(batch)]), Batch)

    async def forward_backward(self, batch: Batch, microbatch: Microbatch) -> StepStats:
        """Add a micro-batch's gradient; only its own rows travel."""
        rows = tuple(batch.rows[index] for index in microbatch.rows)
        part = Batch(
            step=batch.step, rows=rows, num_sequences=batch.num_sequences, num_loss_tokens=batch.num_loss_tokens
        )
        message = [encode(part), encode(Microbatch(rows=tuple(range(len(rows)))))]
        return _only(await self._call("forward_backward", message), StepStats)

    async def optim_step(self) -> StepStats:
        """Clip, apply and clear the gradient."""
        return _only(await self._call("optim_step", []), StepStats)

    async def publish(self, number: int) -> Publication:
        """Write the weights where engines read them."""
        return _only(await self._call("publish", [str(number).encode()]), Publication)

    async def save(self, folder: str) -> None:
        """Write the model in Hugging Face format."""
        await self._call("save", [folder.encode()])

    async def check_health(self) -> None:
        """Return if the process lives.

        Raises:
            ActorDiedError: It does not.
        """
        if self._process is not None and self._process.returncode is not None:
            raise self._death()

    async def close(self) -> None:
        """End the process: hang up, wait a moment, then kill. Removes the shared file that it may have left."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._publication_path.unlink(missing_ok=True)

    async def _call(self, verb: str, parts: list[bytes]) -> list[bytes]:
        async with self._turn:
            if self._reader is None or self._writer is None:
                raise ActorDiedError("the trainer is not running; start it first")
            try:
                self._writer.write(pack(verb, parts))
                await self._writer.drain()
                outcome, answer = await read_frame(self._reader)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                assert self._process is not None
                await self._process.wait()
                raise self._death() from error
        if outcome == "error":
            raise _as_error(answer)
        return answer

    def _death(self) -> ActorDiedError:
        assert self._process is not None
        code = self._process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"status {code}"
        return ActorDiedError(f"the trainer process {self._process.pid} ended with {how}; its log is {self._log_path}")


def _only(parts: Sequence[bytes], noun: type[NounT]) -> NounT:
    (part,) = parts
    return decode(part, noun)


def _as_error(parts: Sequence[bytes]) -> FourstrokeError:
    """The error that the other side raised, of the same class where it is one of our tree."""
    name, text = (part.decode() for part in parts)
    kind = getattr(errors, name, ActorDiedError)
    if isinstance(kind, type) and issubclass(kind, FourstrokeError):
        return kind(text)
    return ActorDiedError(text)
