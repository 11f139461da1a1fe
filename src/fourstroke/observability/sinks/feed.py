"""From a run to its sinks: a queue and a thread for each, so that a slow or broken one holds up nothing.

    controller -> run folder -> SinkFeed -> queue -> thread: open, numbers, numbers, ..., close

``record``, ``event`` and ``problems`` never wait. A sink's library is imported in its thread, only if it is named.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fourstroke.config import SinksConfig
from fourstroke.errors import PreflightError, SinkError, boundary
from fourstroke.observability.events import Event, EventKind

# What a sink may have to catch up with; more means that it will not.
_MOST_QUEUED = 10_000
_CLOSE_S = 20.0
_LOOK_S = 0.05
# Sink: its library, and the distribution that brings it.
_LIBRARIES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "prometheus": ("prometheus_client", "prometheus-client"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSite:
    """What a sink needs to know of its run.

    Attributes:
        run: Name of the run's folder, unique among the runs of a machine.
        folder: Where a sink that writes files makes a folder of its own name.
        settings: The run's configuration, resolved, for tools that list it.
        config: The sinks' own.

    Example:
        >>> SinkSite(run="20261130T133000Z-demo", folder=Path("sinks"), settings={}, config=SinksConfig()).run
        '20261130T133000Z-demo'
    """

    run: str
    folder: Path
    settings: Mapping[str, Any]
    config: SinksConfig


class Sink(Protocol):
    """Takes numbers; called from one thread."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a step. Steps may come again, after a run was resumed."""
        ...

    def close(self, *, is_finished: bool) -> None:
        """The run has ended, finished or not."""
        ...


def check_sinks(config: SinksConfig) -> None:
    """Return if the libraries of all named sinks are installed; imports none of them.

    Raises:
        PreflightError: One is not; names it and the mend.

    Example:
        >>> check_sinks(SinksConfig())
    """
    for name in config.use:
        module, distribution = _LIBRARIES[name]
        if importlib.util.find_spec(module) is None:
            raise PreflightError(
                f"sinks.use names {name!r}, and {distribution} is not installed; install it (pip install "
                f"{distribution}), or take {name!r} out of sinks.use"
            )


def _open(name: str, site: SinkSite) -> Sink:
    module = importlib.import_module(f"fourstroke.observability.sinks.{name}")
    sink: Sink = module.open_sink(site)
    return sink


class SinkFeed:
    """Feeds the sinks that the configuration names; none, if it names none.

    Example:
        >>> feed = SinkFeed(SinkSite(run="demo", folder=Path("sinks"), settings={}, config=SinksConfig()))
        >>> feed.record({"step": 1, "reward/grade/score_mean": 0.25})
        >>> asyncio.run(feed.close())
        >>> feed.problems()
        []
    """

    def __init__(self, site: SinkSite, *, make: Callable[[str, SinkSite], Sink] = _open) -> None:
        self._threads = [_SinkThread(name, site, make) for name in dict.fromkeys(site.config.use)]
        self._counts: Counter[str] = Counter()
        self._step = 0
        self._is_finished = False

    def record(self, record: Mapping[str, float]) -> None:
        """The record of a step, as it was appended to ``metrics.jsonl``."""
        self._step = int(record["step"])
        self._put({name: value for name, value in record.items() if name != "step"} | self._counted())

    def event(self, event: Event) -> None:
        """An event, as it was appended to ``events.jsonl``: counted, and an evaluation's mean is a number."""
        self._counts[event.kind.value] += 1
        if event.kind is EventKind.EVALUATED:
            self._put({f"evaluation/{event.fields['name']}/score_mean": float(event.fields["mean"])})
        elif event.kind is EventKind.RUN_ENDED:
            self._is_finished = event.fields["status"] == "finished"
            self._put(self._counted())

    def problems(self) -> list[str]:
        """What went wrong since the last call, a sentence for each sink that takes nothing more."""
        return [problem for thread in self._threads for problem in thread.problems()]

    async def close(self) -> None:
        """Let the sinks take what is queued and end, for at most 20 s; one that is not done by then is a problem."""
        for thread in self._threads:
            thread.end(is_finished=self._is_finished)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _CLOSE_S
        for thread in self._threads:
            while thread.is_alive and loop.time() < until_s:  # noqa: ASYNC110 - a thread sets no event of asyncio
                await asyncio.sleep(_LOOK_S)
        for thread in self._threads:
            thread.give_up()

    def _counted(self) -> dict[str, float]:
        return {f"events/{kind}": float(count) for kind, count in sorted(self._counts.items())}

    def _put(self, values: dict[str, float]) -> None:
        for thread in self._threads:
            thread.put(self._step, values)


class _SinkThread:
    """One sink with its queue. After its first failure it takes nothing."""

    def __init__(self, name: str, site: SinkSite, make: Callable[[str, SinkSite], Sink]) -> None:
        self._name, self._site, self._make = name, site, make
        self._queue: queue.Queue[tuple[int, dict[str, float]] | bool] = queue.Queue(_MOST_QUEUED)
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._has_failed = False
        # A daemon, so that a hanging library does not hold the process at its end.
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, step: int, values: dict[str, float]) -> None:
        self._offer((step, values))

    def end(self, *, is_finished: bool) -> None:
        self._offer(is_finished)

    def give_up(self) -> None:
        if self.is_alive:
            self._fail(f"sink {self._name}: it did not end within {_CLOSE_S:.0f} s")

    def problems(self) -> list[str]:
        found = []
        while not self._problems.empty():
            found.append(self._problems.get())
        return found

    def _offer(self, item: tuple[int, dict[str, float]] | bool) -> None:
        if self._has_failed:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._fail(f"sink {self._name}: {_MOST_QUEUED} records wait for it, so it gets no more")

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._problems.put(f"{why}; the run goes on without it, and its folder has everything")

    def _work(self) -> None:
        try:
            with boundary(f"sink {self._name}", SinkError):
                sink = self._make(self._name, self._site)
                while not isinstance(item := self._queue.get(), bool):
                    sink.numbers(*item)
                sink.close(is_finished=item)
        except SinkError as error:
            self._fail(str(error))
