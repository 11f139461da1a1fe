"""Who may serve to whom, and what the command refuses before it listens."""

import os
import subprocess
import sys

import pytest

from fourstroke.dashboard.serve import check_access, is_loopback, read_token, serve
from fourstroke.errors import ConfigError, RunFolderError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost"])
def test_loopback_is_loopback(host):
    assert is_loopback(host)
    check_access(host, token=None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "box.example", "localhost.example", "", "127.0.0.1.x"])
def test_anything_else_needs_a_token(host):
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="needs a token") as caught:
        check_access(host, token=None)
    assert "\n" not in str(caught.value)
    check_access(host, token="correct horse battery")


def test_a_token_is_read_without_the_white_space_around_it(tmp_path):
    (tmp_path / "token").write_text(" correct horse battery\n")

    assert read_token(tmp_path / "token") == "correct horse battery"


@pytest.mark.parametrize("text", ["", "short", "two lines of\na longer token", "f\xfcnfzehn und mehr Zeichen"])
def test_a_token_that_is_no_good_is_refused(tmp_path, text):
    (tmp_path / "token").write_text(text)

    with pytest.raises(ConfigError, match="--token-file"):
        read_token(tmp_path / "token")


def test_a_token_file_that_is_missing_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "nowhere")


def test_folders_without_runs_are_refused(tmp_path):
    with pytest.raises(RunFolderError, match="is no folder"):
        serve([tmp_path / "nowhere"], host="127.0.0.1", port=0, token_file=None, say=print)
    with pytest.raises(RunFolderError, match="holds no run folder"):
        serve([tmp_path], host="127.0.0.1", port=0, token_file=None, say=print)


def _run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--host", "0.0.0.0"], 2, "--host 0.0.0.0 lets other machines in, so it needs a token"),
        (["nowhere"], 4, "nowhere is no folder"),
        ([], 4, "runs is no folder"),
    ],
)
def test_the_command_refuses_in_one_sentence(tmp_path, arguments, status, text):
    done = _run("-m", "fourstroke.cli", "dashboard", *arguments, cwd=tmp_path)

    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(f"error: {text}")
    assert len(done.stderr.splitlines()) == 1


def test_the_command_line_loads_no_server_until_it_serves(tmp_path):
    code = (
        "import sys, fourstroke.cli, fourstroke.dashboard.serve, fourstroke.dashboard.pages\n"
        "print([name for name in ('starlette', 'uvicorn', 'jinja2', 'torch', 'tokenizers') if name in sys.modules])"
    )

    assert _run("-c", code, cwd=tmp_path).stdout.strip() == "[]"
