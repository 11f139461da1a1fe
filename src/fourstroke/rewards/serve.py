"""A grader's own process: makes the grader, then answers each episode with a verdict. Started by ``process``.

    python -m fourstroke.rewards.serve FD PARENT

``FD`` is an inherited socket, ``PARENT`` the id of the process that started this one. It ends when the other side hangs
up, and is killed with its parent; it ignores Ctrl-C, which the driver answers for everybody. No clock runs here: the
driver has it. Imports nothing heavy, so that a replacement is there soon; the user's grader may.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from fourstroke.config import GraderConfig, resolve_reference
from fourstroke.errors import ConfigError, FourstrokeError, boundary
from fourstroke.observability import die_with_parent
from fourstroke.rewards.grading import grade
from fourstroke.types import Episode, Grader, Task, decode, encode
from fourstroke.types.frames import pack, read_frame, receive_frame


def make_grader(config: GraderConfig, *, search_path: Sequence[str]) -> Grader:
    """The grader that the configuration names, with modules found where the driver finds them.

    Raises:
        ConfigError: It cannot be imported or made, or is none.
    """
    sys.path[:] = search_path
    make = resolve_reference("grader.use", config.use, arguments=config.arguments)
    with boundary(f"grader.use = {config.use!r} cannot be made", ConfigError):
        grader: Grader = make()
        name: object = grader.name
    if not isinstance(name, str) or not name:
        raise ConfigError(f"grader.use = {config.use!r} has the name {name!r}; a grader's name is text, not empty")
    return grader


async def serve(grader: Grader, connection: socket.socket) -> None:
    """Answer one episode after the other until the other side hangs up."""
    reader, writer = await asyncio.open_connection(sock=connection)
    while True:
        try:
            _, (task, episode) = await read_frame(reader)
        except asyncio.IncompleteReadError:
            return
        verdict = await grade(grader, decode(task, Task), decode(episode, Episode), timeout_s=None)
        writer.write(pack(type(verdict).__name__, [encode(verdict)]))
        await writer.drain()


def main() -> None:
    """Serve one grader until the driver hangs up."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    connection = socket.socket(fileno=int(sys.argv[1]))
    # What the grader starts has no business with it.
    connection.set_inheritable(False)
    first = receive_frame(connection)
    if first is None:
        return
    _, (config_json, *search_path) = first
    try:
        grader = make_grader(
            GraderConfig.model_validate_json(config_json), search_path=[os.fsdecode(path) for path in search_path]
        )
    except FourstrokeError as error:
        traceback.print_exc()  # into the log file of this process
        connection.sendall(pack("error", [str(error).encode("utf-8", "replace")]))
        return
    connection.sendall(pack("ready", [grader.name.encode()]))
    asyncio.run(serve(grader, connection))


if __name__ == "__main__":
    main()
