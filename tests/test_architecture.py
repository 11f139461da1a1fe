"""The architecture, held by reading the source: who imports whom, how long things are, and what is banned where.

Each rule is a function from a parsed file to its offences. The rules run over the package, and each over a small text
that breaks it, so that a rule which no longer fires is noticed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "fourstroke"

# A room imports only rooms on lines above its own; rooms on one line do not import each other.
LINES: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("types",),
    ("config",),
    ("recipes",),
    ("observability",),
    ("store",),
    ("tokens", "algorithms", "weights", "sandbox"),
    ("engines",),
    ("rewards", "environments"),
    ("rollout", "trainer"),
    ("evaluation",),
    ("orchestration",),
    ("planning", "dashboard"),
    ("testing",),
    ("cli",),
)
LINE_OF = {room: number for number, rooms in enumerate(LINES) for room in rooms}
FORBIDDEN_NAMES = {"utils", "util", "common", "core", "helpers", "helper", "base", "manager", "managers"}
MAX_FUNCTION_LINES = 100
MAX_FILE_LINES = 800
# "path:function" of functions that are longer; may only shrink.
LONG_FUNCTIONS: frozenset[str] = frozenset()
# Libraries that one place alone may touch.
ONE_PLACE = {
    "ray": "orchestration/placement.py",
    "vllm": "engines/vllm",
    "sglang": "engines/sglang",
    "sqlite3": "store/",
}
CLOCK, BROAD_EXCEPT = "observability/clock.py", "errors.py"
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "hasattr"}
GENERATOR_NAMES = {"default_rng", "Generator", "SeedSequence", "PCG64", "Philox", "BitGenerator"}


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the package: its path relative to the package, and its text."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        return self.path.partition("/")[0].removesuffix(".py")


SOURCES = [Source(str(file.relative_to(PACKAGE)), file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))]

# --- reading --------------------------------------------------------------------------------------------------------


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, lazy imports too; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parents = ["fourstroke", *source.path.split("/")[:-1]]
                module = ".".join([*parents[: len(parents) - node.level + 1], *([module] if module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` for such an expression, else the empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def used_rooms(source: Source) -> Iterator[tuple[int, str]]:
    """Rooms that a file imports, its own aside."""
    for line, name in imported_modules(source):
        parts = name.split(".")
        room = parts[1] if parts[0] == "fourstroke" and len(parts) > 1 else ""
        if room in LINE_OF and room != source.room:
            yield line, room


def dotted_names(source: Source) -> Iterator[tuple[int, str]]:
    """Every dotted expression of a file, the longest first."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute | ast.Name) and (name := dotted(node)):
            yield node.lineno, name


# --- rules ----------------------------------------------------------------------------------------------------------


def imports_only_upward(source: Source) -> Iterator[str]:
    if source.path == "__init__.py":
        return
    assert source.room in LINE_OF, f"{source.path}: a room that the table does not know"
    for line, room in used_rooms(source):
        if LINE_OF[room] >= LINE_OF[source.room]:
            yield f"{source.path}:{line} imports {room}, which is not above {source.room}"


def keeps_libraries_in_one_place(source: Source) -> Iterator[str]:
    for line, name in imported_modules(source):
        place = ONE_PLACE.get(name.partition(".")[0])
        if place is not None and not source.path.startswith(place):
            yield f"{source.path}:{line} imports {name}, which {place} alone may"


def is_named_for_something(source: Source) -> Iterator[str]:
    for part in source.path.removesuffix(".py").split("/"):
        if part in FORBIDDEN_NAMES:
            yield f"{source.path} is called {part}; name the noun that it holds"


def is_short(source: Source) -> Iterator[str]:
    if (num_lines := source.text.count("\n")) > MAX_FILE_LINES:
        yield f"{source.path} has {num_lines} lines"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES and f"{source.path}:{node.name}" not in LONG_FUNCTIONS:
                yield f"{source.path}:{node.lineno} {node.name} has {num_lines} lines"


def broad_excepts(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        caught: list[ast.expr] = []
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{source.path}:{node.lineno} has a bare except"
            else:
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and dotted(node.func) in ("suppress", "contextlib.suppress"):
            caught = node.args
        if any(dotted(kind) in ("Exception", "BaseException") for kind in caught):
            yield f"{source.path}:{caught[0].lineno} catches every Exception"


def has_no_broad_except(source: Source) -> Iterator[str]:
    found = list(broad_excepts(source))
    yield from found[1:] if source.path == BROAD_EXCEPT else found


def reads_no_wall_clock(source: Source) -> Iterator[str]:
    if source.path == CLOCK:
        return
    for line, name in imported_modules(source):
        if name.split(".")[0] == "time" or name in ("uuid.uuid1", "uuid.uuid4"):
            yield f"{source.path}:{line} imports {name}"
    for line, name in dotted_names(source):
        is_clock = name.endswith((".now", ".utcnow", ".today")) and "date" in name
        if is_clock or name in ("uuid.uuid1", "uuid.uuid4"):
            yield f"{source.path}:{line} uses {name}"


def has_no_global_randomness(source: Source) -> Iterator[str]:
    for line, name in imported_modules(source):
        parts = name.split(".")
        if parts[0] in ("random", "secrets") and parts[1:] != ["Random"]:
            yield f"{source.path}:{line} imports {name}"
        if parts[:2] == ["numpy", "random"] and not GENERATOR_NAMES & set(parts):
            yield f"{source.path}:{line} imports {name}"
    for line, name in dotted_names(source):
        head, _, function = name.rpartition(".")
        if head in ("np.random", "numpy.random") and function not in GENERATOR_NAMES:
            yield f"{source.path}:{line} uses {name}"


def reads_no_environment(source: Source) -> Iterator[str]:
    """Environment variables are read in ``config`` alone; an engine may set those that its library reads."""
    if source.room == "config":
        return
    tree = source.tree
    written: set[int] = set()
    if source.room == "engines":
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.Subscript | ast.Attribute)):
            is_set = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
            is_added_to = isinstance(node, ast.Attribute) and node.attr in ("update", "setdefault")
            if is_set or is_added_to:
                written.add(id(node.value))
    for line, name in imported_modules(source):
        if name in ("os.environ", "os.getenv"):
            yield f"{source.path}:{line} imports {name}"
    for expression in ast.walk(tree):
        if not isinstance(expression, ast.Attribute) or id(expression) in written:
            continue
        if (name := dotted(expression)) in ("os.environ", "os.getenv"):
            yield f"{source.path}:{expression.lineno} reads {name}"


def runs_no_text_as_code(source: Source) -> Iterator[str]:
    for line, name in imported_modules(source):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"{source.path}:{line} imports {name}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            if dotted(node.func) in (*UNSAFE_CALLS, "os.system", "os.popen"):
                yield f"{source.path}:{node.lineno} calls {dotted(node.func)}"
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                    yield f"{source.path}:{node.lineno} runs a shell"


def calls_actors_in_one_place(source: Source) -> Iterator[str]:
    """Ray is called by ``handle.verb.remote(...)`` and awaited in the one place that may import it."""
    if source.path == ONE_PLACE["ray"]:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote":
            yield f"{source.path}:{node.lineno} calls an actor, which {ONE_PLACE['ray']} alone may"


Rule = Callable[[Source], Iterator[str]]
RULES: tuple[Rule, ...] = (
    imports_only_upward,
    keeps_libraries_in_one_place,
    calls_actors_in_one_place,
    is_named_for_something,
    is_short,
    has_no_broad_except,
    reads_no_wall_clock,
    has_no_global_randomness,
    reads_no_environment,
    runs_no_text_as_code,
)


def name_of(rule: Rule) -> str:
    return rule.__name__


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert [offence for source in SOURCES for offence in rule(source)] == []


OFFENCES: tuple[tuple[Rule, str, str], ...] = (
    (imports_only_upward, "types/x.py", "from fourstroke.config import RunConfig"),
    (imports_only_upward, "tokens/x.py", "import fourstroke.algorithms.losses"),
    (imports_only_upward, "trainer/x.py", "def f():\n    from fourstroke.rollout import runner"),
    (imports_only_upward, "store/x.py", "from fourstroke import orchestration"),
    (imports_only_upward, "store/x.py", "from ..engines import vllm"),
    (keeps_libraries_in_one_place, "orchestration/controller.py", "import ray"),
    (keeps_libraries_in_one_place, "rollout/x.py", "def f():\n    from vllm.v1 import engine"),
    (keeps_libraries_in_one_place, "trainer/x.py", "import sqlite3"),
    (keeps_libraries_in_one_place, "orchestration/real_parts.py", "from ray import get"),
    (calls_actors_in_one_place, "orchestration/watch.py", "x = engine.actor.check_health.remote()"),
    (is_named_for_something, "trainer/utils.py", ""),
    (is_named_for_something, "common/x.py", ""),
    (is_short, "trainer/x.py", "x = 1\n" * 801),
    (is_short, "trainer/x.py", "async def f():\n" + "    x = 1\n" * 100),
    (has_no_broad_except, "store/x.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (has_no_broad_except, "store/x.py", "try:\n    f()\nexcept:\n    pass"),
    (has_no_broad_except, "store/x.py", "try:\n    f()\nexcept (OSError, BaseException):\n    pass"),
    (has_no_broad_except, "store/x.py", "with contextlib.suppress(Exception):\n    f()"),
    (has_no_broad_except, "errors.py", "try:\n    f()\nexcept Exception:\n    pass\n" * 2),
    (reads_no_wall_clock, "store/x.py", "import time"),
    (reads_no_wall_clock, "store/x.py", "from time import monotonic"),
    (reads_no_wall_clock, "store/x.py", "x = datetime.now(UTC)"),
    (reads_no_wall_clock, "store/x.py", "x = datetime.datetime.utcnow()"),
    (reads_no_wall_clock, "store/x.py", "x = date.today()"),
    (reads_no_wall_clock, "store/x.py", "x = uuid.uuid4()"),
    (reads_no_wall_clock, "store/x.py", "from uuid import uuid4"),
    (has_no_global_randomness, "store/x.py", "import random"),
    (has_no_global_randomness, "store/x.py", "from random import shuffle"),
    (has_no_global_randomness, "store/x.py", "x = np.random.rand(3)"),
    (has_no_global_randomness, "store/x.py", "from numpy.random import seed"),
    (reads_no_environment, "store/x.py", "x = os.environ['HOME']"),
    (reads_no_environment, "store/x.py", "os.environ['HOME'] = '/'"),
    (reads_no_environment, "store/x.py", "x = os.getenv('HOME')"),
    (reads_no_environment, "store/x.py", "x = {**os.environ}"),
    (reads_no_environment, "store/x.py", "from os import environ"),
    (reads_no_environment, "engines/x.py", "x = os.environ['HOME']"),
    (runs_no_text_as_code, "store/x.py", "x = eval('1')"),
    (runs_no_text_as_code, "store/x.py", "exec('x = 1')"),
    (runs_no_text_as_code, "store/x.py", "import pickle"),
    (runs_no_text_as_code, "store/x.py", "from marshal import loads"),
    (runs_no_text_as_code, "store/x.py", "subprocess.run('ls', shell=True)"),
    (runs_no_text_as_code, "store/x.py", "os.system('ls')"),
    (runs_no_text_as_code, "store/x.py", "x = hasattr(engine, 'pause')"),
)


@pytest.mark.parametrize(
    ("rule", "path", "text"), OFFENCES, ids=[f"{name_of(r)}-{n}" for n, (r, *_) in enumerate(OFFENCES)]
)
def test_the_rule_fires(rule: Rule, path: str, text: str) -> None:
    assert len(list(rule(Source(path, text)))) == 1


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (
            imports_only_upward,
            "config/x.py",
            "from fourstroke.errors import ConfigError\nfrom fourstroke.config import load",
        ),
        (keeps_libraries_in_one_place, "orchestration/placement.py", "import ray"),
        (calls_actors_in_one_place, "orchestration/placement.py", "x = actor.start.remote()"),
        (has_no_broad_except, "errors.py", "try:\n    f()\nexcept Exception:\n    pass"),
        (reads_no_wall_clock, "store/x.py", "x = asyncio.get_running_loop().time()\ny = timedelta(seconds=1)"),
        (reads_no_wall_clock, CLOCK, "import time"),
        (has_no_global_randomness, "store/x.py", "x = np.random.default_rng(3)\nfrom random import Random"),
        (reads_no_environment, "config/x.py", "x = os.environ['HOME']"),
        (reads_no_environment, "engines/x.py", "os.environ['VLLM_X'] = '1'\nos.environ.setdefault('VLLM_Y', '2')"),
        (runs_no_text_as_code, "store/x.py", "model.eval()\nsubprocess.run(['ls'], shell=False)"),
    ],
)
def test_the_rule_lets_right_code_pass(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text))) == []


# --- between rooms --------------------------------------------------------------------------------------------------


def cycle_in(edges: dict[str, set[str]]) -> list[str]:
    """Rooms of an import cycle, or nothing: rooms that import no remaining room are taken away until none is left."""
    remaining = {room: set(targets) for room, targets in edges.items()}
    while free := {room for room, targets in remaining.items() if not targets & remaining.keys()}:
        remaining = {room: targets for room, targets in remaining.items() if room not in free}
    return sorted(remaining)


def test_no_import_cycle_between_rooms() -> None:
    edges: dict[str, set[str]] = {}
    for source in SOURCES:
        edges.setdefault(source.room, set()).update(room for _, room in used_rooms(source))

    assert cycle_in(edges) == []


def test_a_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_long_functions_still_exist() -> None:
    names = {f"{s.path}:{n.name}" for s in SOURCES for n in ast.walk(s.tree) if isinstance(n, ast.FunctionDef)}

    assert names >= LONG_FUNCTIONS


HEAVY = ("torch", "vllm", "transformers")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        *((f"fourstroke.{room}", (*HEAVY, "ray", "matplotlib")) for room in ("config", "types", "recipes", "cli")),
        # The driver's process: models live in actors.
        ("fourstroke.orchestration.training_run", (*HEAVY, "ray", "matplotlib")),
        ("fourstroke.orchestration.evaluation_run", (*HEAVY, "ray", "matplotlib")),
        ("fourstroke.orchestration.real_parts", (*HEAVY, "matplotlib")),
    ],
)
def test_the_module_loads_nothing_heavy(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )

    assert done.stdout.strip() == "[]"
