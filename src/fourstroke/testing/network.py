"""A network with faults between simulated processes: what becomes of each message is decided by a seed.

    caller --request--> process: work --answer--> caller
               |           |         |      |
             slow, lost    dies    dies   slow, lost        and the driver may die before the request or at the answer

A request that is lost is never answered, as with a process that hangs; a caller has its own deadline. When a process
dies, whoever waits for its answer is told so at once. Requests that are sent in order arrive in order; others overtake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, TypeVar

from fourstroke.errors import FourstrokeError

T = TypeVar("T")


class KilledError(BaseException):
    """The driver was killed: what its code does from here on reaches nothing. No ``Exception``: nothing catches it."""


class Fate(StrEnum):
    """What becomes of a message."""

    FINE = "fine"
    SLOW_REQUEST = "slow request"
    SLOW_ANSWER = "slow answer"
    LOST_REQUEST = "lost request"
    LOST_ANSWER = "lost answer"
    TWICE = "twice"
    DEATH_BEFORE = "death before"
    DEATH_AFTER = "death after"
    DRIVER_DIES_BEFORE = "driver dies before"
    DRIVER_DIES_AFTER = "driver dies after"


_FAULTS = [fate for fate in Fate if fate is not Fate.FINE]
# Weights of the faults, in the order of the enum.
_WEIGHTS = [2, 2, 1, 2, 3, 2, 2, 1, 2]
# Of the calls whose caller was cancelled, those that are worked on nevertheless.
_OUTLIVES_CALLER = 0.5
# Messages that follow a fault.
_BURST_MESSAGES = 20
# Two ordered requests are at least so far apart.
_NEXT_S = 1e-6


@dataclass(slots=True, kw_only=True)
class FaultPlan:
    """Which messages meet a fault: each with a probability, until so many have.

    Attributes:
        random: Decides; asked in the order of the messages.
        num_left: Faults that are still to come.
        probability: That of a fault at a message.
        burst: That of a fault at each of the messages that follow a fault.
        jitter_s: A message takes up to so many seconds.
        slow_s: A slow one takes up to so many more.
    """

    random: Random
    num_left: int
    probability: float
    burst: float
    jitter_s: float
    slow_s: float
    num_burst: int = 0

    def fate(self, *, may_be_twice: bool) -> Fate:
        """The fate of the next message."""
        if not self._is_struck():
            return Fate.FINE
        fate = self.random.choices(_FAULTS, weights=_WEIGHTS)[0]
        return fate if fate is not Fate.TWICE or may_be_twice else Fate.SLOW_ANSWER

    def fate_of_commit(self) -> Fate:
        """Whether the driver dies before or after it commits its next transaction."""
        if not self._is_struck():
            return Fate.FINE
        return self.random.choice([Fate.DRIVER_DIES_BEFORE, Fate.DRIVER_DIES_AFTER])

    def _is_struck(self) -> bool:
        if not self.num_left:
            return False
        self.num_burst -= self.num_burst > 0
        probability = max(self.probability, self.burst * (self.num_burst > 0))
        is_struck = self.random.random() < probability
        if is_struck:
            self.num_left -= 1
            self.num_burst = _BURST_MESSAGES
        return is_struck

    def delay_s(self, *, is_slow: bool) -> float:
        """Seconds that one way takes."""
        return self.random.random() * (self.jitter_s + self.slow_s * is_slow)


@dataclass(slots=True, eq=False)
class Process:
    """A process that the driver placed. It dies once, and takes along what runs in it.

    Attributes:
        name: For errors and the trace.
        died: The error that its death is to whoever calls it.
        on_death: Told of the death.
        obituary: How it ended; empty while it lives.
        arrival_s: When the last of the ordered requests arrived.
        callers: Whoever waits for an answer.
        work: What it is at.
    """

    name: str
    died: type[FourstrokeError]
    on_death: Callable[[], None]
    obituary: str = ""
    arrival_s: float = 0.0
    callers: dict[asyncio.Future[Any], None] = field(default_factory=dict)
    work: dict[asyncio.Task[None], None] = field(default_factory=dict)

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something, as a task that ends with the process."""
        task = asyncio.create_task(work, name=f"{self.name} at work")
        self.work[task] = None
        task.add_done_callback(lambda done: self.work.pop(done, None))
        return task

    def kill(self, how: str) -> None:
        """Die now."""
        if self.obituary:
            return
        self.obituary = f"{self.name} is gone: {how}"
        self.on_death()
        for answer in list(self.callers):
            if not answer.done():
                answer.set_exception(self.died(self.obituary))
        for task in list(self.work):
            task.cancel()


class Network:
    """Carries calls to processes, for as long as one driver lives.

    Args:
        plan: Decides the fate of each message.
        tell: Told of each message, for the trace: process, verb and fate.
        kill_driver: Kills the driver.
        on_breach: Told of a process whose own rules were broken by a call.
    """

    def __init__(
        self,
        plan: FaultPlan,
        *,
        tell: Callable[[str, str, Fate], None],
        kill_driver: Callable[[], None],
        on_breach: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._tell = tell
        self._kill_driver = kill_driver
        self._on_breach = on_breach
        self._is_cut = False

    def cut(self) -> None:
        """The driver is dead: carry nothing any more."""
        self._is_cut = True

    def check(self) -> None:
        """Return while the driver lives."""
        if self._is_cut:
            raise KilledError

    async def call(
        self,
        process: Process,
        verb: str,
        work: Callable[[], Awaitable[T]],
        *,
        is_ordered: bool = False,
        on_second: Callable[[T], None] | None = None,
        may_outlive_caller: bool = True,
    ) -> T:
        """Have a process do something.

        Args:
            process: Where.
            verb: For the trace.
            work: What; runs as a task of the process, once for each time that the request arrives.
            is_ordered: Whether the request arrives after all ordered ones before it.
            on_second: Takes the second answer where the request may arrive twice.
            may_outlive_caller: Whether word of the caller's end may be lost.

        Raises:
            FourstrokeError: What the work raised, or the death of the process.
            KilledError: The driver is dead.
        """
        self.check()
        if process.obituary:
            raise process.died(process.obituary)
        fate = self._plan.fate(may_be_twice=on_second is not None)
        outlives_caller = may_outlive_caller and self._plan.random.random() < _OUTLIVES_CALLER
        self._tell(process.name, verb, fate)
        if fate is Fate.DRIVER_DIES_BEFORE:
            self._kill_driver()
            raise KilledError
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        deliveries = [_deliver_to(answer)]
        if fate is Fate.TWICE and on_second is not None:
            deliveries.append(_deliver_second(on_second))
        process.callers[answer] = None
        tasks = [
            process.begin(self._serve(process, work, fate, deliver, is_ordered=is_ordered)) for deliver in deliveries
        ]
        try:
            return await answer
        except asyncio.CancelledError:
            # Word of it reaches the process, or does not.
            if not outlives_caller:
                for task in tasks:
                    task.cancel()
            raise
        finally:
            del process.callers[answer]

    async def _serve(
        self,
        process: Process,
        work: Callable[[], Awaitable[T]],
        fate: Fate,
        deliver: Callable[[T | FourstrokeError], None],
        *,
        is_ordered: bool,
    ) -> None:
        await self._travel(process, is_slow=fate is Fate.SLOW_REQUEST, is_ordered=is_ordered)
        if fate is Fate.LOST_REQUEST:
            return
        if fate is Fate.DEATH_BEFORE:
            process.kill("signal 9")
            return
        result: T | FourstrokeError
        try:
            result = await work()
        except FourstrokeError as error:
            result = error
        except KilledError:
            return
        except AssertionError as error:
            # Whoever called may be gone, so that nobody else would hear of it.
            self._on_breach(f"{process.name}: {error}")
            return
        if fate is Fate.DEATH_AFTER:
            process.kill("signal 9")
        if fate is Fate.DRIVER_DIES_AFTER:
            self._kill_driver()
        if fate is Fate.LOST_ANSWER or process.obituary:
            return
        await asyncio.sleep(self._plan.delay_s(is_slow=fate is Fate.SLOW_ANSWER))
        deliver(result)

    async def _travel(self, process: Process, *, is_slow: bool, is_ordered: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        arrival_s = now_s + self._plan.delay_s(is_slow=is_slow)
        if is_ordered:
            process.arrival_s = arrival_s = max(arrival_s, process.arrival_s + _NEXT_S)
        await asyncio.sleep(arrival_s - now_s)


def _deliver_to(answer: asyncio.Future[T]) -> Callable[[T | FourstrokeError], None]:
    def deliver(result: T | FourstrokeError) -> None:
        if answer.done():
            return
        if isinstance(result, FourstrokeError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    return deliver


def _deliver_second(on_second: Callable[[T], None]) -> Callable[[T | FourstrokeError], None]:
    def deliver(result: T | FourstrokeError) -> None:
        if not isinstance(result, FourstrokeError):
            on_second(result)

    return deliver
