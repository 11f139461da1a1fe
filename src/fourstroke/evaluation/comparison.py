"""Comparisons of evaluations that run folders hold: one run before and after training, or two runs. Only reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fourstroke.errors import RunFolderError
from fourstroke.evaluation.evaluate import EvaluationReport, counted_apart
from fourstroke.evaluation.statistics import PairedDifference, paired_difference
from fourstroke.store import RunFolder

# The order of a run: others come after them, by name.
_NAMES = ("before", "after")


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two evaluations that are compared, and what it left out.

    Attributes:
        run: Name of the run's folder.
        evaluation: Name of the evaluation.
        version: Number of the weights that it judged.
        apart: Episodes that are no plain score, by kind, as :func:`counted_apart` counts them.

    Example:
        >>> comparison.first.evaluation  # doctest: +SKIP
        'before'
    """

    run: str
    evaluation: str
    version: int
    apart: dict[str, int]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two evaluations, and how they differ over the tasks that both have.

    Example:
        >>> compare_runs(folder)[0].found.difference  # doctest: +SKIP
        0.75
    """

    first: Side
    second: Side
    found: PairedDifference

    def lines(self) -> list[str]:
        """What a person should know of it."""
        found = self.found
        verdict = "a difference" if found.is_found else "no difference that this comparison could tell from chance"
        lines = [
            f"{side.run} {side.evaluation} (version {side.version}): {mean:.3f}{in_words(side.apart)}"
            for side, mean in ((self.first, found.first), (self.second, found.second))
        ]
        lines.append(
            f"  difference {found.difference:+.3f}  95 % [{found.low:+.3f}, {found.high:+.3f}]  "
            f"over {found.num_tasks} tasks: {verdict}"
        )
        lines.append(f"  a true difference of {found.minimum_detectable:.3f} would be found four times out of five")
        if found.num_only_first or found.num_only_second:
            lines.append(f"  left out: {found.num_only_first} and {found.num_only_second} tasks that only one has")
        return lines


def in_words(apart: dict[str, int]) -> str:
    """What :func:`counted_apart` counted, for the end of a line; empty if that was nothing.

    Example:
        >>> in_words({"failed": 2, "not scored": 0, "cut by length": 5})
        ', 2 failed, 5 cut by length'
    """
    return "".join(f", {count} {name}" for name, count in apart.items() if count)


def read_evaluations(folder: Path, *, names: Sequence[str] | None = None) -> dict[str, EvaluationReport]:
    """The reports in a run's ``evaluations`` folder, by name: first "before", then "after", then others.

    Args:
        folder: The folder; need not be there.
        names: Read only these, as far as they are there; all if None.

    Raises:
        RunFolderError: A report is damaged; names the file.

    Example:
        >>> read_evaluations(Path("nowhere"))
        {}
    """
    found = sorted(path.stem for path in folder.glob("*.json"))
    ordered = [*(name for name in _NAMES if name in found), *(name for name in found if name not in _NAMES)]
    return {name: _read(folder / f"{name}.json") for name in ordered if names is None or name in names}


def compare_runs(first: RunFolder, second: RunFolder | None = None) -> tuple[Comparison, ...]:
    """Each evaluation of one run against its next one or, of two runs, those of one name against each other.

    Raises:
        RunFolderError: There are no two evaluations to compare, or one is damaged.
        DataError: Two evaluations share fewer than two scored tasks.

    Example:
        >>> compare_runs(RunFolder.open(path))  # doctest: +SKIP
        (Comparison(first=Side(run='20261130T133000Z-quickstart', evaluation='before', ...),)
    """
    pairs = tuple(_of_one(first) if second is None else _of_two(first, second))
    if pairs:
        return pairs
    if second is None:
        raise RunFolderError(f"{first.path} holds no two evaluations to compare; name a run that finished, or two runs")
    raise RunFolderError(
        f"{first.path} and {second.path} hold no evaluation of one name; name runs that were evaluated alike"
    )


def _of_one(run: RunFolder) -> Iterator[Comparison]:
    reports = list(read_evaluations(run.evaluations_dir).values())
    for earlier, later in itertools.pairwise(reports):
        yield _comparison((run, earlier), (run, later))


def _of_two(first: RunFolder, second: RunFolder) -> Iterator[Comparison]:
    others = read_evaluations(second.evaluations_dir)
    for name, report in read_evaluations(first.evaluations_dir).items():
        if name in others:
            yield _comparison((first, report), (second, others[name]))


def _comparison(first: tuple[RunFolder, EvaluationReport], second: tuple[RunFolder, EvaluationReport]) -> Comparison:
    found = paired_difference(first[1].scores, second[1].scores)
    return Comparison(first=_side(*first), second=_side(*second), found=found)


def _side(run: RunFolder, report: EvaluationReport) -> Side:
    return Side(
        run=run.path.absolute().name,
        evaluation=report.name,
        version=report.version,
        apart=counted_apart(report),
    )


def _read(path: Path) -> EvaluationReport:
    try:
        return msgspec.json.decode(path.read_bytes(), type=EvaluationReport)
    except msgspec.MsgspecError as error:
        raise RunFolderError(f"{path} is damaged ({error}); restore it from a copy") from error
