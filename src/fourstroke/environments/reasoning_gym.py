"""Adapter for the procedural datasets of reasoning-gym, and a grader that uses their scorers.

The reply that a scorer sees is hostile text. All scorers of version 0.1.25 were read and attacked; those that run the
reply as code, can be made to run without end, or judge wrongly are refused by name, and other versions of the package
are refused until they have been read. The package is imported only when a dataset is asked for.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import inspect
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fourstroke.environments.single_turn import SingleTurnTaskset
from fourstroke.environments.split import task_of
from fourstroke.errors import ConfigError, DataError, boundary
from fourstroke.types import Episode, Message, Scored, Task

AUDITED_VERSION = "0.1.25"

# Scorers are linear or mildly worse in the reply's length; a longer reply than this answers no question of theirs.
MAX_REPLY_CHARACTERS = 10_000

_EVALUATES = "its scorer calls eval on the reply"
_PARSES = "its scorer hands the reply to SymPy's parser, which runs it as code"
_NO_GOLD = "it has no gold answer that its scorer accepts"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "binary_matrix": _EVALUATES,
        "n_queens": _EVALUATES,
        "spiral_matrix": _EVALUATES,
        "string_insertion": _EVALUATES,
        "countdown": _PARSES,
        "intermediate_integration": _PARSES,
        "polynomial_multiplication": _PARSES,
        "puzzle24": _PARSES,
        "simple_integration": _PARSES,
        "coin_flip": "the reply 1e999999999 keeps its scorer busy without end",
        "propositional_logic": "a reply of many negations keeps its scorer busy without end",
        "rubiks_cube": "a large repeat count in the reply keeps its scorer busy without end",
        "boxnet": _NO_GOLD,
        "graph_color": _NO_GOLD,
        "rush_hour": _NO_GOLD,
        "complex_arithmetic": "its scorer gives the reply nan the full score",
        "game_of_life_halting": "its scorer takes any text for a yes",
        "polynomial_equations": "its scorer takes any text where there is no real root",
        "prime_factorization": "its scorer raises on any reply that is not a product of numbers",
        "list_functions": "the same seed does not give the same questions",
        "composite": "it mixes datasets, refused ones among them; name one dataset",
    }
)

_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


def reasoning_gym(
    *,
    name: str,
    size: int,
    seed: int = 0,
    held_out_fraction: float = 0.5,
    arguments: Mapping[str, Any] = _NO_ARGUMENTS,
) -> SingleTurnTaskset:
    """The tasks of one reasoning-gym dataset, its questions as prompts; equal questions become one task.

    Source: Stojanovski et al. 2025, Reasoning Gym, arXiv:2505.24760.

    Args:
        name: Name of the dataset ("chain_sum").
        size: Number of entries to generate, before equal ones become one.
        seed: The dataset's own seed.
        held_out_fraction: Share of questions that are held out, about.
        arguments: Further settings of the dataset.

    Raises:
        ConfigError: The package is missing or of another version, the dataset is unknown or refused, a setting is
            wrong, or an entry's gold answer does not get the full score.

    Example:
        >>> taskset = reasoning_gym(name="chain_sum", size=20)
        >>> taskset.train[0].prompt[0].role
        'user'
    """
    _, entries = _dataset(name=name, size=size, seed=seed, arguments=arguments)
    tasks = (_task(entry) for entry in entries.values())
    return SingleTurnTaskset(tasks, held_out_fraction=held_out_fraction)


def reasoning_gym_grader(
    *, name: str, size: int, seed: int = 0, arguments: Mapping[str, Any] = _NO_ARGUMENTS
) -> ReasoningGymGrader:
    """A grader for the tasks of :func:`reasoning_gym` with the same ``name``, ``size``, ``seed`` and ``arguments``.

    Raises:
        ConfigError: As :func:`reasoning_gym`.

    Example:
        >>> reasoning_gym_grader(name="chain_sum", size=20).name.split("@")[0]
        'reasoning_gym.chain_sum'
    """
    dataset, entries = _dataset(name=name, size=size, seed=seed, arguments=arguments)
    return ReasoningGymGrader(name, dataset=dataset, entries=entries)


class ReasoningGymGrader:
    """Scores the whole reply, without white space around it, by the dataset's own scorer. Partial credit is kept."""

    def __init__(self, dataset_name: str, *, dataset: Any, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self._dataset = dataset
        self._entries = entries
        sources = inspect.getsource(sys.modules[__name__]) + inspect.getsource(sys.modules[type(dataset).__module__])
        self._name = f"reasoning_gym.{dataset_name}@{hashlib.sha256(sources.encode()).hexdigest()[:8]}"

    @property
    def name(self) -> str:
        """Dataset, with a digest of our code and of the dataset's."""
        return self._name

    async def grade(self, task: Task, episode: Episode) -> Scored:
        """The dataset's score of the reply; 0 for an empty one and for one of more than 10,000 characters.

        Raises:
            DataError: The task is none of this grader's.
        """
        entry = self._entries.get(task.id)
        if entry is None:
            raise DataError(
                f"task {task.id} is not of {self._name}; give grader.arguments the name, size, seed and arguments "
                "of tasks.arguments"
            )
        reply = episode.reply.strip()
        if not reply:
            return self._scored(0.0, "empty reply")
        if len(reply) > MAX_REPLY_CHARACTERS:
            return self._scored(0.0, "reply too long")
        return self._scored(float(self._dataset.score_answer(reply, entry)), "scored by the dataset")

    def _scored(self, score: float, reason: str) -> Scored:
        return Scored(score=score, components={"dataset": score}, reason=reason, grader=self._name, cost_s=0.0)


def _task(entry: Mapping[str, Any]) -> Task:
    return task_of((Message(role="user", content=entry["question"]),), answer=entry["answer"])


def _dataset(
    *, name: str, size: int, seed: int, arguments: Mapping[str, Any]
) -> tuple[Any, dict[str, Mapping[str, Any]]]:
    """The dataset, and its entries by task id."""
    if name in REFUSED:
        raise ConfigError(f"name = {name!r} is refused: {REFUSED[name]}; choose another dataset of reasoning-gym")
    package = _package()
    if name not in package.factory.DATASETS:
        close = difflib.get_close_matches(name, package.factory.DATASETS, n=1)
        mend = f"did you mean {close[0]!r}?" if close else "see reasoning-gym's gallery for their names"
        raise ConfigError(f"name = {name!r} is no dataset of reasoning-gym; {mend}")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"size = {size!r} is refused; set a whole number of entries, 1 or more")
    with boundary(f"reasoning-gym's dataset {name} refuses arguments = {dict(arguments)!r}", ConfigError):
        dataset = package.create_dataset(name, size=size, seed=seed, **arguments)
        generated = [dataset[index] for index in range(size)]
        for index, entry in enumerate(generated):
            gold = entry["answer"]
            if not isinstance(gold, str) or not gold.strip() or dataset.score_answer(gold.strip(), entry) != 1.0:
                raise ConfigError(f"name = {name!r}: entry {index} cannot grade its own gold answer; change arguments")
    entries: dict[str, Mapping[str, Any]] = {}
    for entry in generated:
        entries.setdefault(_task(entry).id, entry)
    return dataset, entries


def _package() -> Any:
    try:
        import reasoning_gym as package
    except ImportError as error:
        raise ConfigError("reasoning-gym is not installed; install the extra fourstroke[reasoning]") from error
    version = importlib.metadata.version("reasoning-gym")
    if version != AUDITED_VERSION:
        raise ConfigError(
            f"reasoning-gym {version} is installed, and its scorers were audited at {AUDITED_VERSION}; install that one"
        )
    return package
