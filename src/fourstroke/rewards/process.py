"""Graders in processes of their own, so that one that never comes back can be killed.

    driver                                   | child (``serve``), leader of its own process group
    GraderPool -> Dispatcher -> GraderProcess -- socket pair, frames of codec bytes --> grade -> the user's grader

A child is handed the grader's reference and where to look for modules, answers ``ready`` with the grader's name or
``error``, then one verdict for each episode. It may not import torch by itself, and it dies with the driver's thread.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from fourstroke.config import GraderConfig
from fourstroke.errors import ActorDiedError, CodecError, ConfigError
from fourstroke.rewards.dispatch import Dispatcher
from fourstroke.types import Episode, Message, Scored, Tamper, Task, ToolCall, Unscored, Verdict, decode, encode
from fourstroke.types.frames import Frame, pack, read_frame

_GRACE_S = 2.0
_VERDICTS: dict[str, type[Scored | Unscored | Tamper]] = {kind.__name__: kind for kind in (Scored, Unscored, Tamper)}


class GraderPool:
    """The user's grader in ``num_processes`` processes, behind the ``Grader`` protocol; it never raises for a failure.

    A pool belongs to the event loop, and to the thread, that started it.

    Args:
        config: The grader and how many processes it has.
        timeout_s: Seconds for one episode, from when a process begins it; past it the process is killed.
        environment: All variables of the processes.
        log_path: File for whatever they print.
        start_timeout_s: Seconds for a process to import and make the grader.

    Example:
        >>> async def graded() -> Verdict:
        ...     pool = GraderPool(GraderConfig(), timeout_s=30.0, environment=dict(os.environ), log_path=path)
        ...     await pool.start()
        ...     verdict = await pool.grade(task, episode)
        ...     await pool.close()
        ...     return verdict
        >>> asyncio.run(graded()).score  # doctest: +SKIP
        1.0
    """

    def __init__(
        self,
        config: GraderConfig,
        *,
        timeout_s: float,
        environment: Mapping[str, str],
        log_path: Path,
        start_timeout_s: float = 600.0,
    ) -> None:
        workers = [
            GraderProcess(config, environment=environment, log_path=log_path) for _ in range(config.num_processes)
        ]
        self._dispatcher = Dispatcher(workers, timeout_s=timeout_s, start_timeout_s=start_timeout_s)

    @property
    def name(self) -> str:
        """Name of the grader and digest of its code; known after ``start``."""
        return self._dispatcher.grader_name

    async def start(self) -> None:
        """Start the processes and have each make the grader.

        Raises:
            ConfigError: The grader cannot be imported or made.
            GradingError: A process died at each of several starts, or was not ready in time.
        """
        await self._dispatcher.start()

    async def grade(self, task: Task, episode: Episode) -> Verdict:
        """The grader's verdict, or ``Unscored`` with the reason (see ``grading`` and ``Dispatcher.grade``)."""
        return await self._dispatcher.grade(task, episode)

    async def close(self) -> None:
        """End the processes; episodes that still wait are ``Unscored``. May be called twice."""
        await self._dispatcher.close()


class GraderProcess:
    """A child process and its replacements, behind the ``Worker`` protocol of ``dispatch``."""

    def __init__(self, config: GraderConfig, *, environment: Mapping[str, str], log_path: Path) -> None:
        self._config = config
        self._environment = environment
        self._log_path = log_path
        self._grader_name = ""
        self._life: _Life | None = None

    @property
    def is_running(self) -> bool:
        """Whether a child is there that nobody killed."""
        return self._life is not None and not self._life.is_ending

    @property
    def grader_name(self) -> str:
        """As the child gave it."""
        assert self._grader_name, "the grader's name is known after start"
        return self._grader_name

    async def start(self) -> None:
        """Start a child and wait until it has made the grader.

        Raises:
            ConfigError: The child says that it cannot.
            ActorDiedError: It died.
        """
        assert not self.is_running
        ours, theirs = socket.socketpair()
        with theirs:
            self._life = _Life(self._spawn(theirs))
        await self._life.connect(ours)
        head, parts = await self._ask("start", [self._config.model_dump_json().encode(), *_search_path()])
        if head == "error":
            raise ConfigError(parts[0].decode())
        self._grader_name = parts[0].decode()

    async def grade(self, task: Task, episode: Episode) -> Verdict:
        """The child's verdict.

        Raises:
            ActorDiedError: It died, or answered with something else.
        """
        try:
            message = [encode(task), encode(episode)]
        except UnicodeEncodeError:
            message = [encode(task), encode(_without_surrogates(episode))]
        head, parts = await self._ask("grade", message)
        try:
            return decode(parts[0], _VERDICTS[head])
        except (CodecError, KeyError, IndexError) as error:
            raise ActorDiedError(f"{self._who} answered with {head!r}, which is no verdict") from error

    async def kill(self) -> None:
        """End the child and its process group by SIGKILL."""
        if self._life is not None:
            await self._life.kill()

    async def close(self) -> None:
        """Hang up, wait a moment for the child to end by itself, then kill it."""
        if self._life is not None:
            await self._life.close()

    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        # -P: modules come from where the driver looks. -u: what a grader printed before it was killed is in the log.
        options = ["-P", "-u", "-m", "fourstroke.rewards.serve"]
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *options, str(connection.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(connection.fileno(),),
                env=dict(self._environment),
                start_new_session=True,
            )

    async def _ask(self, head: str, parts: list[bytes]) -> Frame:
        assert self._life is not None, "the grader process was not started"
        try:
            return await self._life.ask(pack(head, parts))
        except CodecError as error:
            raise ActorDiedError(f"{self._who} broke the protocol: {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ActorDiedError(f"{self._who} {await self._life.ending()}; its log is {self._log_path}") from error

    @property
    def _who(self) -> str:
        return f"grader.use = {self._config.use!r}: the grader process {self._life.pid if self._life else 0}"


class _Life:
    """One child from its start to its end.

    A descriptor of the process tells the loop when the child has ended. Until then nobody reaps it, so that its id,
    and with it that of its group, cannot pass to a stranger before the group was killed.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._is_killed = False
        self._has_ended = asyncio.Event()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._descriptor = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._bury)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ending(self) -> bool:
        """Whether it ended, was killed, or was hung up on."""
        return self._is_killed or self._has_ended.is_set() or (self._writer is not None and self._writer.is_closing())

    async def connect(self, ours: socket.socket) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=ours)

    async def ask(self, message: bytes) -> Frame:
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(message)
        await self._writer.drain()
        return await read_frame(self._reader)

    async def ending(self) -> str:
        """How it ended, in words; it is about to."""
        await self._wait()
        code = self._process.returncode
        if code is None:
            return "hung up"
        return f"ended with signal {-code}" if code < 0 else f"ended with status {code}"

    async def kill(self) -> None:
        if not self._has_ended.is_set():
            self._is_killed = True
            self._kill_group()
            await self._wait()

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            await self._wait()
        await self.kill()

    async def _wait(self) -> None:
        """Until the end, but no longer than a moment: a process may be stuck in the kernel."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._has_ended.wait()

    def _bury(self) -> None:
        """The child has ended: kill what it started, reap it, and end whoever waits for its answer."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._kill_group()
        self._process.wait()
        self._has_ended.set()
        if self._writer is not None:
            # What the child forked may hold the other end open, so the end of the stream would not come.
            self._writer.transport.abort()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _search_path() -> list[bytes]:
    """Where this process finds modules, so that the child finds the same."""
    return [os.fsencode(folder) for folder in sys.path]


def _without_surrogates(episode: Episode) -> Episode:
    """The episode with U+FFFD for each lone surrogate, which UTF-8 cannot hold: such text is graded too."""
    messages = tuple(
        Message(
            role=message.role,
            content=_whole(message.content),
            tool_calls=tuple(
                ToolCall(id=_whole(call.id), name=_whole(call.name), arguments=_whole(call.arguments))
                for call in message.tool_calls
            ),
        )
        for message in episode.messages
    )
    return msgspec.structs.replace(episode, messages=messages)


def _whole(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
