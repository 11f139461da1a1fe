"""One tree of errors, and the one broad ``except`` of the project.

A user's mistake is a :class:`FourstrokeError` whose text is one sentence: the key or file, the value, and the mend.
Each error is also a standard type, so that code which knows nothing of Fourstroke can catch it. A programmer's mistake
is an ``assert`` with the value. Everything else propagates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FourstrokeError(Exception):
    """Root of the tree; the command line prints it as one sentence and exits with :attr:`exit_code`."""

    exit_code = 1


class ConfigError(FourstrokeError, ValueError):
    """A key, a value or a combination in the configuration is wrong."""

    exit_code = 2


class PreflightError(FourstrokeError, RuntimeError):
    """The machine cannot hold the run: processor, system, disk, shared memory, a missing part."""

    exit_code = 3


class ModelNotFoundError(FourstrokeError, FileNotFoundError):
    """A model was named that is neither in the catalogue, nor a folder, nor to be had from the hub."""

    exit_code = 3


class RunFolderError(FourstrokeError, RuntimeError):
    """A run folder is in use, has a newer schema, or is damaged."""

    exit_code = 4


class CodecError(FourstrokeError, ValueError):
    """Bytes that are not a noun of ours, or one of another schema."""


class EngineDiedError(FourstrokeError, RuntimeError):
    """An inference engine or its worker process is gone."""

    exit_code = 5


class ActorDiedError(FourstrokeError, RuntimeError):
    """A process that we placed (the trainer, say) is gone."""

    exit_code = 5


class ActorFailedError(FourstrokeError, RuntimeError):
    """A process that we placed lives and raised an error that is not of this tree; trying again would not mend it."""

    exit_code = 5


class ClusterDiedError(FourstrokeError, RuntimeError):
    """What the parts live in is gone, so that none of them can be replaced."""

    exit_code = 5


class PublicationError(FourstrokeError, RuntimeError):
    """A publication of weights did not arrive whole: name, shape, dtype, digest or version differ."""

    exit_code = 6


class MismatchError(FourstrokeError, RuntimeError):
    """The engine's log-probabilities and the trainer's are further apart than the run allows."""

    exit_code = 6


class DeadlineError(FourstrokeError, TimeoutError):
    """A named wait ran past its deadline."""

    exit_code = 7


class DataError(FourstrokeError, ValueError):
    """A task, an episode or a row breaks an invariant; the text names its id."""


class DoesNotFitError(DataError):
    """A task's prompt and a full reply do not fit the engine's context; the draw is dropped."""


class TooManyDropsError(FourstrokeError, RuntimeError):
    """So many draws in a row were dropped that the run cannot be going right."""

    exit_code = 8


class GradingError(FourstrokeError, RuntimeError):
    """A grader could not judge an episode; becomes an ``Unscored`` verdict, never a score."""


class SinkError(FourstrokeError, RuntimeError):
    """A copy of a run's numbers could not be made (TensorBoard and the like); told to a person, and stops nothing."""


class InterruptedRunError(FourstrokeError, InterruptedError):
    """The user asked the run to stop (Ctrl-C, SIGTERM)."""

    exit_code = 130


@contextmanager
def boundary(what: str, into: type[FourstrokeError]) -> Iterator[None]:
    """Attribute any failure of code that is not ours to the boundary that it crossed.

    The only broad ``except`` of the project. Errors of our own tree pass unchanged, as do interrupts and cancellations
    (they are no ``Exception``).

    Args:
        what: The boundary, named so that a reader finds it ("grader exact on episode 3f2a").
        into: The error of our tree to raise; the first cause stays attached.

    Example:
        >>> with boundary("grader exact", GradingError):
        ...     raise ZeroDivisionError("division by zero")
        Traceback (most recent call last):
        fourstroke.errors.GradingError: grader exact: ZeroDivisionError: division by zero
    """
    try:
        yield
    except FourstrokeError:
        raise
    except Exception as error:
        raise into(f"{what}: {type(error).__name__}: {error}") from error
