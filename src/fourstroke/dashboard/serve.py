"""Serving the pages: who may ask, and the server that answers.

On a loopback address everybody on the machine may ask. On any other address a token is needed, and there is no way
around it.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from fourstroke.dashboard.runs import Runs
from fourstroke.errors import ConfigError, PreflightError, RunFolderError

_NEEDED = ("jinja2", "starlette", "uvicorn")
LEAST_TOKEN_CHARS = 16
_LONGEST_WARM_UP_S = 3.0


def is_loopback(host: str) -> bool:
    """Whether a host name or address leads back to this machine and nowhere else.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """The token in a file: its text without white space at its ends.

    Raises:
        ConfigError: The file cannot be read, or the token is shorter than 16 characters or not plain ASCII.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path} cannot be read ({error}); name a file that holds a token") from error
    if len(token) < LEAST_TOKEN_CHARS or not token.isprintable():
        raise ConfigError(
            f"--token-file {path} holds a token of {len(token)} characters; use {LEAST_TOKEN_CHARS} or more"
        )
    return token


def check_access(host: str, *, token: str | None) -> None:
    """Return if pages may be served on ``host``.

    Raises:
        ConfigError: It is not loopback, and there is no token.

    Example:
        >>> check_access("0.0.0.0", token=None)
        Traceback (most recent call last):
        fourstroke.errors.ConfigError: --host 0.0.0.0 lets other machines in, so it needs a token; give --token-file ...
    """
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} lets other machines in, so it needs a token; give --token-file, or serve on 127.0.0.1"
        )


def serve(
    paths: Sequence[Path],
    *,
    host: str,
    port: int,
    token_file: Path | None,
    say: Callable[[str], None],
) -> None:
    """Serve the pages until the process is interrupted.

    Args:
        paths: Run folders, or folders that hold them.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        token_file: Holds the token that readers must give; needed unless ``host`` is loopback.
        say: Takes the line with the address, once the server listens.

    Raises:
        ConfigError: The host needs a token, or the token is no good.
        PreflightError: The server's libraries are not installed, or the address cannot be listened on.
        RunFolderError: A path is no folder, or none of them holds a run.
    """
    token = read_token(token_file) if token_file else None
    check_access(host, token=token)
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise PreflightError(f"{name} is not installed, which serves the pages; install fourstroke[dashboard]")
    runs = Runs(paths)
    if not runs.all():
        raise RunFolderError(f"{', '.join(map(str, paths))} holds no run folder; name one, or a folder that holds some")
    from fourstroke.dashboard.app import listen

    # The address is told once the newest runs are indexed, so that the first look does not wait, or at last without.
    indexing = threading.Thread(target=runs.warm_up, name="warm-up", daemon=True)
    indexing.start()
    indexing.join(_LONGEST_WARM_UP_S)

    listen(runs, host=host, port=port, token=token, say=say)
