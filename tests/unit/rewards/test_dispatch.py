"""The queue before the graders, in virtual time: order, clocks, replacements, and one verdict for each call."""

import asyncio
import heapq
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourstroke.errors import ActorDiedError, ConfigError, FourstrokeError, GradingError
from fourstroke.rewards.dispatch import MAX_STARTS, Dispatcher
from fourstroke.testing.clock import VirtualClockLoop, run_virtual
from fourstroke.types import Episode, Message, Scored, StopReason, Task, Timings, Unscored, Verdict

TASK = Task(id="t", prompt=(), answer="7")
TIMEOUT_S = 0.105
START_TIMEOUT_S = 10.0


def job(number: int, *, takes_s: float, dies: bool = False) -> Episode:
    """An episode whose grading takes so long and then gives a verdict, or ends the process."""
    return Episode(
        id=str(number),
        group="g",
        member=number,
        task_id="t",
        attempt=0,
        spans=(),
        stop=StopReason.FINISHED,
        messages=(Message(role="assistant", content=f"{takes_s} {dies}"),),
        timings=Timings(generate_s=0.0),
    )


class FakeWorker:
    """A process in virtual time; it fails the test where it is used as no process may be used."""

    grader_name = "fake@00000000"

    def __init__(self, *, starts: Iterable[BaseException | float] = (), start_s: float = 0.0) -> None:
        self._starts = iter(starts)
        self._start_s = start_s
        self._answer: asyncio.Future[None] | None = None
        self.is_running = False
        self.num_started = 0
        self.num_kills = 0
        self.begun: list[tuple[float, str]] = []

    async def start(self) -> None:
        assert not self.is_running
        outcome = next(self._starts, self._start_s)
        self.num_started += 1
        if isinstance(outcome, BaseException):
            raise outcome
        await asyncio.sleep(outcome)
        self.is_running = True

    async def grade(self, task: Task, episode: Episode) -> Verdict:
        assert task is TASK
        assert self.is_running
        assert self._answer is None, episode.id
        loop = asyncio.get_running_loop()
        self.begun.append((loop.time(), episode.id))
        self._answer = loop.create_future()
        takes_s, dies = episode.reply.split()
        loop.call_later(
            float(takes_s), self._end, self._answer, ActorDiedError("signal 11") if dies == "True" else None
        )
        await self._answer
        self._answer = None
        return Scored(score=1.0, components={}, reason=episode.id, grader=self.grader_name, cost_s=0.0)

    async def kill(self) -> None:
        self.num_kills += 1
        self._end(self._answer, ActorDiedError("it ended with signal 9"))
        self._answer = None
        self.is_running = False

    def _end(self, answer: asyncio.Future[None] | None, error: ActorDiedError | None) -> None:
        if answer is not None and not answer.done():
            if error is None:
                answer.set_result(None)
            else:
                self.is_running = False
                answer.set_exception(error)

    async def close(self) -> None:
        await self.kill()


def dispatcher(workers: Sequence[FakeWorker]) -> Dispatcher:
    return Dispatcher(workers, timeout_s=TIMEOUT_S, start_timeout_s=START_TIMEOUT_S)


def kind_of(verdict: Verdict) -> str:
    return verdict.reason if isinstance(verdict, Unscored) else "scored"


# --- properties -----------------------------------------------------------------------------------------------------

JOBS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 20), st.booleans()).map(lambda j: (j[0] / 100, j[1] / 100, j[2])),
    max_size=25,
)


@given(jobs=JOBS, num_workers=st.integers(1, 4))
def test_jobs_begin_in_order_at_the_earliest_time_and_each_has_its_own_outcome(
    jobs: list[tuple[float, float, bool]], num_workers: int
) -> None:
    """Against a queue with as many servers, written as a loop: arrival, then the first server that is free."""
    jobs = sorted(jobs, key=lambda each: each[0])
    workers = [FakeWorker() for _ in range(num_workers)]

    async def call(queue: Dispatcher, episode: Episode) -> tuple[Verdict, float]:
        return await queue.grade(TASK, episode), asyncio.get_running_loop().time()

    async def run() -> list[tuple[Verdict, float]]:
        queue = dispatcher(workers)
        await queue.start()
        calls = []
        for number, (arrival_s, takes_s, dies) in enumerate(jobs):
            await asyncio.sleep(arrival_s - asyncio.get_running_loop().time())
            calls.append(asyncio.create_task(call(queue, job(number, takes_s=takes_s, dies=dies))))
        return await asyncio.gather(*calls)

    outcomes = run_virtual(run())

    free_at = [0.0] * num_workers
    begun = {int(name): time_s for worker in workers for time_s, name in worker.begun}
    for number, ((arrival_s, takes_s, dies), (verdict, ended_s)) in enumerate(zip(jobs, outcomes, strict=True)):
        begins_s = max(arrival_s, heapq.heappop(free_at))
        ends_s = begins_s + min(takes_s, TIMEOUT_S)
        heapq.heappush(free_at, ends_s)
        assert begun[number] == pytest.approx(begins_s)
        assert ended_s == pytest.approx(ends_s)
        assert kind_of(verdict) == ("timeout" if takes_s > TIMEOUT_S else "crashed" if dies else "scored")
        if isinstance(verdict, Scored):
            assert verdict.reason == str(number)


@given(
    jobs=JOBS,
    num_workers=st.integers(1, 3),
    starts=st.lists(st.one_of(st.just(ActorDiedError("died")), st.sampled_from([0.0, 0.05, 20.0])), max_size=40),
    cancelled=st.sets(st.integers(0, 24)),
    closes_at_s=st.one_of(st.none(), st.integers(0, 60).map(lambda n: n / 100)),
)
def test_each_call_has_one_outcome_whatever_fails(
    jobs: list[tuple[float, float, bool]],
    num_workers: int,
    starts: list[BaseException | float],
    cancelled: set[int],
    closes_at_s: float | None,
) -> None:
    workers = [FakeWorker() for _ in range(num_workers)]

    async def call(queue: Dispatcher, number: int, arrival_s: float, takes_s: float, dies: bool) -> str:
        await asyncio.sleep(arrival_s)
        grading = asyncio.create_task(queue.grade(TASK, job(number, takes_s=takes_s, dies=dies)))
        if number in cancelled:
            await asyncio.sleep(0.03)
            grading.cancel()
        try:
            verdict = await grading
        except asyncio.CancelledError:
            return "cancelled"
        assert isinstance(verdict, Unscored) or verdict.reason == str(number)
        return kind_of(verdict)

    async def run() -> list[str]:
        queue = dispatcher(workers)
        await queue.start()
        after_start = iter(starts)
        for worker in workers:
            worker._starts = after_start
        calls = [asyncio.create_task(call(queue, number, *each)) for number, each in enumerate(jobs)]
        if closes_at_s is not None:
            await asyncio.sleep(closes_at_s)
            await queue.close()
        return await asyncio.gather(*calls)

    outcomes = run_virtual(run())

    begun = [name for worker in workers for _, name in worker.begun]
    assert len(outcomes) == len(jobs)
    assert len(begun) == len(set(begun))
    for number, ((_, takes_s, dies), outcome) in enumerate(zip(jobs, outcomes, strict=True)):
        right = "timeout" if takes_s > TIMEOUT_S else "crashed" if dies else "scored"
        allowed = {right}
        allowed |= {"cancelled"} if number in cancelled else set()
        allowed |= {"aborted"} if closes_at_s is not None else set()
        allowed |= {"crashed"} if str(number) not in begun else set()
        assert outcome in allowed


# --- replacements ---------------------------------------------------------------------------------------------------


def test_a_job_past_its_deadline_is_killed_and_the_others_are_not_disturbed() -> None:
    workers = [FakeWorker(), FakeWorker()]

    async def run() -> list[Verdict]:
        queue = dispatcher(workers)
        await queue.start()
        jobs = [job(0, takes_s=99.0), *(job(number, takes_s=0.04) for number in range(1, 6))]
        return await asyncio.gather(*(queue.grade(TASK, each) for each in jobs))

    verdicts = run_virtual(run())

    assert [kind_of(verdict) for verdict in verdicts] == ["timeout", *["scored"] * 5]
    assert verdicts[0].cost_s == pytest.approx(TIMEOUT_S)
    assert isinstance(verdicts[0], Unscored)
    assert verdicts[0].detail == "grader fake@00000000 ran past 0.105 s on episode 0 and was killed"
    assert [worker.num_kills for worker in workers] == [1, 0]
    assert [worker.num_started for worker in workers] == [2, 1]


def test_starting_a_replacement_costs_a_job_nothing_of_its_time() -> None:
    async def run() -> list[Verdict]:
        queue = dispatcher([FakeWorker(start_s=5.0)])
        await queue.start()
        return await asyncio.gather(*(queue.grade(TASK, job(n, takes_s=0.1, dies=n == 0)) for n in range(3)))

    assert [kind_of(verdict) for verdict in run_virtual(run())] == ["crashed", "scored", "scored"]


def test_a_process_that_died_while_idle_costs_no_job() -> None:
    worker = FakeWorker()

    async def run() -> Verdict:
        queue = dispatcher([worker])
        await queue.start()
        worker.is_running = False
        return await queue.grade(TASK, job(0, takes_s=0.0))

    assert kind_of(run_virtual(run())) == "scored"
    assert worker.num_started == 2


def test_an_episode_waits_for_no_start_while_another_process_is_idle() -> None:
    workers = [FakeWorker(start_s=5.0), FakeWorker(start_s=5.0)]

    async def run() -> float:
        queue = dispatcher(workers)
        await queue.start()
        workers[0].is_running = False
        await queue.grade(TASK, job(0, takes_s=0.0))
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == 5.0
    assert [worker.num_started for worker in workers] == [1, 1]


def test_where_no_replacement_starts_its_job_is_told_and_the_next_tries_again() -> None:
    died = ActorDiedError("it ended with status 1")
    worker = FakeWorker(starts=[0.0, *[died] * MAX_STARTS, 0.0])

    async def run() -> list[Verdict]:
        queue = dispatcher([worker])
        await queue.start()
        return [await queue.grade(TASK, job(n, takes_s=0.0, dies=n == 0)) for n in range(3)]

    verdicts = run_virtual(run())

    assert [kind_of(verdict) for verdict in verdicts] == ["crashed", "crashed", "scored"]
    assert isinstance(verdicts[1], Unscored)
    assert verdicts[1].detail == "on episode 1: it ended with status 1; so it went 3 times in a row"


def test_an_answer_that_came_while_the_loop_was_held_up_counts() -> None:
    """The loop then finds the answer and the deadline together, the answer first."""

    async def run() -> Verdict:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        queue = dispatcher([FakeWorker()])
        await queue.start()
        grading = asyncio.create_task(queue.grade(TASK, job(0, takes_s=0.1)))
        await asyncio.sleep(0.05)
        loop._jumping.now += 10.0
        return await grading

    assert kind_of(run_virtual(run())) == "scored"


# --- start and end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "error", "text"),
    [
        ([ConfigError("grader.use = 'm:f' cannot be imported")], ConfigError, "grader.use = 'm:f' cannot be imported"),
        ([ActorDiedError("it died")] * MAX_STARTS, GradingError, "it died; so it went 3 times in a row"),
        ([99.0], GradingError, "grader.use: its process was not ready within 10.0 s"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_no_process(
    starts: list[BaseException | float], error: type[FourstrokeError], text: str
) -> None:
    workers = [FakeWorker(), FakeWorker(starts=starts, start_s=1.0), FakeWorker(start_s=1000.0)]

    with pytest.raises(error, match=f"^{text}$"):
        run_virtual(dispatcher(workers).start())

    assert not any(worker.is_running for worker in workers)
    assert all(worker.num_kills for worker in workers)


def test_a_start_that_dies_fewer_times_goes_well() -> None:
    worker = FakeWorker(starts=[ActorDiedError("it died")] * (MAX_STARTS - 1))

    run_virtual(dispatcher([worker]).start())

    assert worker.is_running
    assert worker.num_started == MAX_STARTS


def test_closing_answers_whoever_waits() -> None:
    async def run() -> list[Verdict]:
        queue = dispatcher([FakeWorker()])
        await queue.start()
        calls = [asyncio.create_task(queue.grade(TASK, job(number, takes_s=0.1))) for number in range(3)]
        await asyncio.sleep(0.01)
        await queue.close()
        return [*await asyncio.gather(*calls), await queue.grade(TASK, job(3, takes_s=0.0))]

    verdicts = run_virtual(run())

    assert [kind_of(verdict) for verdict in verdicts] == ["aborted"] * 4


def test_closing_while_a_replacement_starts_leaves_no_process() -> None:
    class Interruptible(FakeWorker):
        async def start(self) -> None:
            await super().start()
            if self.num_kills > 1:
                self.is_running = False
                raise ActorDiedError("it ended with signal 9")

    worker = Interruptible(start_s=1.0)

    async def run() -> Verdict:
        queue = dispatcher([worker])
        await queue.start()
        worker.is_running = False
        call = asyncio.create_task(queue.grade(TASK, job(0, takes_s=0.0)))
        await asyncio.sleep(0.5)
        await worker.kill()
        await queue.close()
        return await call

    assert kind_of(run_virtual(run())) == "aborted"
    assert not worker.is_running
    assert worker.num_started == 2


def test_a_caller_that_is_cancelled_frees_its_worker() -> None:
    worker = FakeWorker()

    async def run() -> tuple[Verdict, float]:
        queue = dispatcher([worker])
        await queue.start()
        first = asyncio.create_task(queue.grade(TASK, job(0, takes_s=0.1)))
        await asyncio.sleep(0.01)
        first.cancel()
        return await queue.grade(TASK, job(1, takes_s=0.0)), asyncio.get_running_loop().time()

    verdict, now_s = run_virtual(run())

    assert kind_of(verdict) == "scored"
    assert now_s == pytest.approx(0.01)
    assert worker.num_kills == 1
