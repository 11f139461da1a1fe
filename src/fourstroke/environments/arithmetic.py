"""Small sums, differences and products of whole numbers: a taskset that a small model can learn in minutes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from fourstroke.environments.single_turn import SingleTurnTaskset
from fourstroke.environments.split import task_of
from fourstroke.errors import ConfigError
from fourstroke.types import Message, Task

OPERATIONS = ("add", "subtract", "multiply")


def arithmetic(
    *,
    operations: Sequence[str] = ("add", "subtract"),
    max_left: int = 25,
    max_right: int = 9,
    system: str | None = None,
    held_out_fraction: float = 0.5,
    seed: int = 0,
) -> SingleTurnTaskset:
    """Every distinct problem "What is a + b?" (or - or *), once each, in an order that ``seed`` fixes.

    Sums and products take a in 1..max_left and b in 1..max_right. Differences take a in 2..max_left + 1 and b in
    1..min(a - 1, max_right), so their results are positive. The defaults give 225 sums and 189 differences.

    Args:
        operations: Any of "add", "subtract", "multiply".
        max_left: Largest left number (one more in differences).
        max_right: Largest right number.
        system: Text of a system message before each problem, or None to leave that to the model's chat template.
        held_out_fraction: Share of problems that are held out, about.
        seed: Changes the order of the tasks, never which of them are held out.

    Raises:
        ConfigError: An argument makes no taskset.

    Example:
        >>> taskset = arithmetic()
        >>> len(taskset.train), len(taskset.held_out)
        (212, 202)
    """
    unknown = [name for name in operations if name not in OPERATIONS]
    if isinstance(operations, str) or not operations or unknown:
        raise ConfigError(f"operations = {operations!r} is refused; list one or more of {', '.join(OPERATIONS)}")
    for key, value in (("max_left", max_left), ("max_right", max_right)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10_000:
            raise ConfigError(f"{key} = {value!r} is refused; set a whole number from 1 to 10000")
    problems = (
        problem for name in dict.fromkeys(operations) for problem in _problems(name, left=max_left, right=max_right)
    )
    opening = () if system is None else (Message(role="system", content=system),)
    tasks = [task_of((*opening, Message(role="user", content=text)), answer=str(answer)) for text, answer in problems]
    return SingleTurnTaskset(_shuffled(tasks, seed=seed), held_out_fraction=held_out_fraction)


def _problems(operation: str, *, left: int, right: int) -> Iterator[tuple[str, int]]:
    match operation:
        case "add":
            yield from ((f"What is {a} + {b}?", a + b) for a in range(1, left + 1) for b in range(1, right + 1))
        case "subtract":
            for a in range(2, left + 2):
                yield from ((f"What is {a} - {b}?", a - b) for b in range(1, min(a - 1, right) + 1))
        case "multiply":
            yield from ((f"What is {a} * {b}?", a * b) for a in range(1, left + 1) for b in range(1, right + 1))
        case _:
            raise AssertionError(operation)


def _shuffled(tasks: list[Task], *, seed: int) -> list[Task]:
    """Ordered by a hash of seed and id: the same on every machine and for every version of a random generator."""
    return sorted(tasks, key=lambda task: hashlib.sha256(f"{seed}/{task.id}".encode()).digest())
