"""Real grader processes: killed past their deadline with all that they started, replaced, told from a low score."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from fourstroke.config import GraderConfig
from fourstroke.errors import ConfigError, GradingError
from fourstroke.rewards import GraderPool
from fourstroke.rewards.process import GraderProcess
from fourstroke.types import Episode, Message, Scored, StopReason, Task, Timings, ToolCall, Unscored, Verdict

T = TypeVar("T")

TASK = Task(id="t", prompt=(Message(role="user", content="?"),), answer="7")

_GRADERS = '''
import os, resource, signal, subprocess, sys
from fourstroke.types import Scored

class Obeying:
    """Does what the reply says."""

    name = "obeying@00000000"

    def __init__(self, fifo):
        self.fifo = fifo

    async def grade(self, task, episode):
        verb, *rest = episode.reply.split()
        score, reason, components = 1.0, "", {}
        if verb == "compute":
            resource.setrlimit(resource.RLIMIT_CPU, (120, 120))  # for the day that nobody kills it
            print("computing")
            while True:
                pass
        elif verb == "start":
            subprocess.Popen(["sleep", "100"], stdout=open(self.fifo, "w"))
            os.kill(os.getpid(), signal.SIGKILL) if rest == ["die"] else signal.pause()
        elif verb == "fork":
            if os.fork() == 0:
                signal.pause()
            os._exit(4)
        elif verb == "kill":
            os.kill(os.getpid(), int(rest[0]))
            signal.pause()
        elif verb == "exit":
            sys.exit(int(rest[0]))
        elif verb == "raise":
            raise ZeroDivisionError("division by zero")
        elif verb == "none":
            return None
        elif verb == "components":
            components = {7: 1.0}
        elif verb == "print":
            print("printed by the grader")
            sys.stderr.write("and to stderr")
        elif verb == "look":
            has_torch, leads = "torch" in sys.modules, os.getpid() == os.getsid(0)
            reason = f"{sys.stdin.read()!r} {has_torch} {os.environ.get('GIVEN')} {leads}"
        elif verb == "say":
            reason = " ".join(rest)
        return Scored(score=score, components=components, reason=reason, grader=self.name, cost_s=0.0)

def obeying(*, fifo=""):
    return Obeying(fifo)

def refusing():
    raise RuntimeError("no licence")

def nameless():
    return object()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the search path, with the graders above and with modules that fail at import."""
    (tmp_path / "graders_for_tests.py").write_text(_GRADERS)
    (tmp_path / "broken_at_import.py").write_text("raise ImportError('no such part')")
    (tmp_path / "dying_at_import.py").write_text("import os; print('about to die', flush=True); os._exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def episode(reply: str, *, member: int = 0, calls: tuple[ToolCall, ...] = ()) -> Episode:
    return Episode(
        id=f"g.{member}",
        group="g",
        member=member,
        task_id="t",
        attempt=0,
        spans=(),
        stop=StopReason.FINISHED,
        messages=(Message(role="assistant", content=reply, tool_calls=calls),),
        timings=Timings(generate_s=0.0),
    )


def pool_of(
    folder: Path, *, timeout_s: float = 60.0, use: str = "graders_for_tests:obeying", **settings: Any
) -> GraderPool:
    config = GraderConfig(use=use, **settings)
    environment = {**os.environ, "GIVEN": "given"}
    return GraderPool(config, timeout_s=timeout_s, environment=environment, log_path=folder / "graders.log")


def with_pool(pool: GraderPool, work: Callable[[GraderPool], Awaitable[T]]) -> T:
    async def run() -> T:
        await pool.start()
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def graded(pool: GraderPool, *replies: str) -> list[Verdict]:
    """Verdicts on replies that are graded one after the other."""

    async def work(pool: GraderPool) -> list[Verdict]:
        return [await pool.grade(TASK, episode(reply, member=member)) for member, reply in enumerate(replies)]

    return with_pool(pool, work)


def in_words(verdict: Verdict) -> str:
    if isinstance(verdict, Unscored):
        return f"{verdict.reason}: {verdict.detail}"
    assert isinstance(verdict, Scored)
    return f"{verdict.score} {verdict.reason}".strip()


def open_fifo(folder: Path) -> int:
    path = folder / "fifo"
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def assert_all_writers_end(reader: int) -> None:
    """A pipe ends once the last process that could write into it is gone."""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        os.set_blocking(pipe.fileno(), True)
        while select.select([pipe], [], [], 30)[0]:
            if not pipe.read(1 << 16):
                return
    pytest.fail("a process still holds the pipe after 30 s")


# --- deadlines and deaths -------------------------------------------------------------------------------------------


def test_a_grader_that_computes_for_ever_is_killed_and_replaced(folder: Path) -> None:
    compute, say = graded(pool_of(folder, timeout_s=1.0), "compute", "say hello")

    assert isinstance(compute, Unscored)
    assert compute.reason == "timeout"
    assert compute.detail == "grader obeying@00000000 ran past 1.0 s on episode g.0 and was killed"
    assert compute.grader == "obeying@00000000"
    assert compute.cost_s >= 1.0
    assert in_words(say) == "1.0 hello"


@pytest.mark.parametrize(("how", "reason"), [("start wait", "timeout"), ("start die", "crashed")])
def test_what_a_grader_started_ends_with_it(folder: Path, how: str, reason: str) -> None:
    reader = open_fifo(folder)

    pool = pool_of(folder, timeout_s=1.0, arguments={"fifo": str(folder / "fifo")})
    (verdict,) = graded(pool, how)

    assert isinstance(verdict, Unscored)
    assert verdict.reason == reason
    assert_all_writers_end(reader)


@pytest.mark.parametrize(
    ("reply", "how"),
    [
        (f"kill {int(signal.SIGSEGV)}", f"signal {int(signal.SIGSEGV)}"),
        (f"kill {int(signal.SIGKILL)}", f"signal {int(signal.SIGKILL)}"),
        ("exit 3", "status 3"),
        ("fork", "status 4"),  # the forked child holds the socket open
    ],
)
def test_a_death_is_told_with_its_signal_or_status_and_the_next_episode_is_graded(
    folder: Path, reply: str, how: str
) -> None:
    dead, say = graded(pool_of(folder), reply, "say hello")

    assert isinstance(dead, Unscored)
    assert dead.reason == "crashed"
    assert dead.detail.startswith("on episode g.0: grader.use = 'graders_for_tests:obeying': the grader process ")
    assert dead.detail.endswith(f" ended with {how}; its log is {folder / 'graders.log'}")
    assert in_words(say) == "1.0 hello"


def test_a_process_that_is_killed_while_idle_costs_no_episode(folder: Path) -> None:
    process = GraderProcess(
        GraderConfig(use="graders_for_tests:obeying"), environment=os.environ, log_path=folder / "graders.log"
    )

    async def run() -> tuple[bool, str]:
        await process.start()
        os.kill(process._life.pid, signal.SIGKILL)
        await process._life._has_ended.wait()
        await process.start()
        verdict = await process.grade(TASK, episode("say hello"))
        is_running = process.is_running
        await process.close()
        return is_running, in_words(verdict)

    assert asyncio.run(run()) == (True, "1.0 hello")


def test_other_episodes_are_not_disturbed(folder: Path) -> None:
    async def work(pool: GraderPool) -> list[Verdict]:
        replies = [f"kill {int(signal.SIGKILL)}" if n % 7 == 3 else f"say {n}" for n in range(40)]
        return await asyncio.gather(*(pool.grade(TASK, episode(reply)) for reply in replies))

    verdicts = with_pool(pool_of(folder, num_processes=2), work)

    for number, verdict in enumerate(verdicts):
        if number % 7 == 3:
            assert isinstance(verdict, Unscored)
            assert verdict.reason == "crashed"
        else:
            assert in_words(verdict) == f"1.0 {number}"


def test_failures_of_the_graders_code_are_told_as_in_process(folder: Path) -> None:
    verdicts = graded(pool_of(folder), "raise", "none", "components", "say hello")

    assert [in_words(verdict).partition(":")[0] for verdict in verdicts] == [
        "error",
        "bad_return",
        "bad_return",
        "1.0 hello",
    ]
    assert "ZeroDivisionError: division by zero" in in_words(verdicts[0])


# --- hostile text ---------------------------------------------------------------------------------------------------


def test_no_text_breaks_the_protocol(folder: Path) -> None:
    hostile = [
        "say \0\x08\xff",
        "say " + "\x92\xa7verdict" * 10,
        "say \ud800",
        "say " + "x" * 10_000_000,
        "say \U0001f600",
    ]

    verdicts = graded(pool_of(folder), *hostile, "say hello")

    said = [text.removeprefix("say ").replace("\ud800", "\ufffd")[:1000] for text in hostile]
    assert [in_words(verdict) for verdict in verdicts] == [f"1.0 {text}" for text in (*said, "hello")]


def test_a_lone_surrogate_in_a_tool_call_is_graded_too(folder: Path) -> None:
    call = ToolCall(id="\udfff", name="\udfff", arguments="\ud83d\ude00")

    verdict = with_pool(pool_of(folder), lambda pool: pool.grade(TASK, episode("say hello", calls=(call,))))

    assert in_words(verdict) == "1.0 hello"


# --- surroundings ---------------------------------------------------------------------------------------------------


@pytest.fixture
def typed() -> Iterator[None]:
    """Standard input of this process with something in it."""
    kept = os.dup(0)
    reader, writer = os.pipe()
    os.write(writer, b"typed by a person")
    os.dup2(reader, 0)
    os.close(reader)
    os.close(writer)
    yield
    os.dup2(kept, 0)
    os.close(kept)


@pytest.mark.usefixtures("typed")
def test_a_process_has_no_input_no_torch_its_own_session_and_the_given_variables(folder: Path) -> None:
    (verdict,) = graded(pool_of(folder), "look")

    assert in_words(verdict) == "1.0 '' False given True"


def test_the_name_is_the_graders(folder: Path) -> None:
    async def work(pool: GraderPool) -> str:
        return pool.name

    assert with_pool(pool_of(folder), work) == "obeying@00000000"


def test_what_a_grader_prints_goes_into_the_log(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    graded(pool_of(folder), "print", "kill 9")

    assert (folder / "graders.log").read_text() == "printed by the grader\nand to stderr"
    assert capfd.readouterr() == ("", "")


def graders() -> list[psutil.Process]:
    """Those among this process's children; other tests may have left helpers of the interpreter's."""
    return [child for child in psutil.Process().children() if "fourstroke.rewards.serve" in child.cmdline()]


def test_ctrl_c_reaches_no_grader(folder: Path) -> None:
    async def work(pool: GraderPool) -> list[str]:
        children = graders()
        for child in children:
            child.send_signal(signal.SIGINT)
        return [in_words(await pool.grade(TASK, episode("say hello"))), str(len(children))]

    assert with_pool(pool_of(folder), work) == ["1.0 hello", "1"]


_DRIVER = """
import asyncio, os, sys
from pathlib import Path
from fourstroke.config import GraderConfig
from fourstroke.rewards import GraderPool
from fourstroke.types import Episode, Message, StopReason, Task, Timings

async def main():
    config = GraderConfig(use="graders_for_tests:obeying", num_processes=2)
    pool = GraderPool(config, timeout_s=999.0, environment=dict(os.environ), log_path=Path(sys.argv[1]))
    await pool.start()
    reply = Message(role="assistant", content="compute")
    episode = Episode(id="g.0", group="g", member=0, task_id="t", attempt=0, spans=(), stop=StopReason.FINISHED,
                      messages=(reply,), timings=Timings(generate_s=0.0))
    await pool.grade(Task(id="t", prompt=(), answer="7"), episode)

asyncio.run(main())
"""


def test_processes_end_with_the_one_that_started_them(folder: Path) -> None:
    """One of the two computes for ever and would never see that the driver hung up."""
    reader = open_fifo(folder)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    with subprocess.Popen([sys.executable, "-c", _DRIVER, str(folder / "fifo")], env=environment) as driver:
        try:
            assert select.select([reader], [], [], 60)[0]
            assert os.read(reader, 100).startswith(b"computing")
        finally:
            driver.kill()

    assert_all_writers_end(reader)


# --- start and end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "text"),
    [
        ("broken_at_import:f", "cannot be imported: ImportError: no such part"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("graders_for_tests:absent", ": graders_for_tests has no function 'absent'"),
        ("graders_for_tests:refusing", "cannot be made: RuntimeError: no licence"),
        ("graders_for_tests:nameless", "cannot be made: AttributeError: "),
    ],
)
def test_a_grader_that_cannot_start_is_told_in_one_sentence(folder: Path, use: str, text: str) -> None:
    pool = pool_of(folder, use=use, num_processes=2)

    with pytest.raises(ConfigError) as failure:
        asyncio.run(pool.start())

    assert str(failure.value).startswith(f"grader.use = '{use}'")
    assert text in str(failure.value)
    assert "\n" not in str(failure.value)
    assert graders() == []


def test_a_process_that_dies_at_start_is_tried_three_times(folder: Path) -> None:
    with pytest.raises(GradingError) as failure:
        asyncio.run(pool_of(folder, use="dying_at_import:f").start())

    assert str(failure.value).startswith("grader.use = 'dying_at_import:f': the grader process ")
    assert str(failure.value).endswith(
        f" ended with status 3; its log is {folder / 'graders.log'}; so it went 3 times in a row"
    )
    assert (folder / "graders.log").read_text() == "about to die\n" * 3


def test_closing_in_the_middle_answers_everybody_and_leaves_no_process(folder: Path) -> None:
    async def run() -> list[Verdict]:
        pool = pool_of(folder)
        await pool.start()
        calls = [asyncio.create_task(pool.grade(TASK, episode(reply))) for reply in ("compute", "say a", "say b")]
        await asyncio.sleep(0)
        await pool.close()
        await pool.close()
        return await asyncio.gather(*calls)

    verdicts = asyncio.run(run())

    assert [in_words(verdict).partition(":")[0] for verdict in verdicts] == ["aborted"] * 3
    assert graders() == []
