"""Several tasks as one: what ends, what is cancelled, and which error comes out."""

import asyncio

import pytest

from tessera.errors import InvalidInput, Overloaded, RequestCancelled
from tessera.tasks import Departure, Keeper, Left, Promise, run_all, run_until
from tests.waiting import all_turns


class Work:
    """Runs until it is told to finish; remembers how it ended."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.finish = asyncio.Event()
        self.cancelled = False

    async def run(self, result: int = 1) -> int:
        self.begun.set()
        try:
            await self.finish.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # cleaning up takes a turn of the loop
            self.cancelled = True
            raise
        return result


async def never() -> None:
    await asyncio.Event().wait()


async def refuse() -> int:
    raise InvalidInput("no")


async def test_work_that_ends_first_gives_its_result() -> None:
    work, left = Work(), asyncio.get_running_loop().create_future()
    work.finish.set()
    assert await run_until(left, work.run(7)) == 7
    assert left.cancelled()


async def test_the_error_of_the_work_comes_out_as_it_is() -> None:
    with pytest.raises(InvalidInput, match="no"):
        await run_until(never(), refuse())


async def test_work_that_nobody_waits_for_has_ended_when_left_is_raised() -> None:
    work, left = Work(), asyncio.Event()
    running = asyncio.ensure_future(run_until(left.wait(), work.run()))
    await work.begun.wait()
    left.set()
    with pytest.raises(Left):
        await running
    assert work.cancelled


async def test_a_cancellation_from_outside_ends_the_work_too() -> None:
    work = Work()
    running = asyncio.ensure_future(run_until(never(), work.run()))
    await work.begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert work.cancelled


async def test_an_error_of_what_is_watched_counts_as_leaving() -> None:
    work = Work()
    with pytest.raises(Left):
        await run_until(refuse(), work.run())
    assert work.cancelled


async def test_all_results_come_in_order() -> None:
    first, second = Work(), Work()
    second.finish.set()
    running = asyncio.ensure_future(run_all([first.run(1), second.run(2)]))
    await first.begun.wait()
    first.finish.set()
    assert await running == [1, 2]
    assert await run_all([second.run(3)]) == [3]
    assert await run_all([]) == []


async def test_the_first_error_comes_out_when_the_others_have_ended() -> None:
    work = Work()

    async def fail() -> int:
        await work.begun.wait()
        raise Overloaded("full", retry_after=2.0)

    with pytest.raises(Overloaded) as raised:
        await run_all([work.run(), fail()])
    assert raised.value.retry_after == 2.0
    assert work.cancelled


async def test_a_cancellation_from_outside_ends_all() -> None:
    works = [Work(), Work()]
    running = asyncio.ensure_future(run_all([work.run() for work in works]))
    await works[1].begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert all(work.cancelled for work in works)


async def test_a_departure_ends_work_that_is_under_way() -> None:
    departure, ended = Departure(), []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    task = asyncio.create_task(departure.during(work()))
    await all_turns()
    departure.leave()
    departure.leave()
    with pytest.raises(RequestCancelled):
        await task
    assert ended and not task.cancelled()
    # Nothing begins for who has gone.
    with pytest.raises(RequestCancelled):
        await departure.during(work())
    assert len(ended) == 1


async def test_a_departure_behind_the_work_changes_nothing() -> None:
    departure = Departure()
    assert await departure.during(asyncio.sleep(0, "done")) == "done"
    departure.leave()
    await asyncio.sleep(0.01)


async def test_a_cancellation_from_outside_is_no_departure() -> None:
    departure = Departure()
    task = asyncio.create_task(departure.during(asyncio.sleep(60)))
    await all_turns()
    departure.leave()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Rounds:
    """A loop's rounds, of which those that are numbered fail."""

    def __init__(self, failing: range) -> None:
        self.count = 0
        self.failing = failing
        self._ran = asyncio.Event()

    async def run(self) -> None:
        number, self.count = self.count, self.count + 1
        self._ran.set()
        if number in self.failing:
            raise RuntimeError("odd")

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.count < count:
                self._ran.clear()
                await self._ran.wait()


@pytest.fixture
def keeper() -> Keeper:
    return Keeper(first_pause=0.001, longest_pause=0.002)


async def test_a_loop_goes_on_after_errors_which_are_logged_and_counted(
    keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = Rounds(range(1, 3))
    loop = keeper.start("kind", rounds.run, of="somebody")
    await rounds.until(6)
    assert keeper.failures == {"kind": 2}
    assert "kind of somebody" in caplog.text and "RuntimeError: odd" in caplog.text
    assert keeper.trouble is None
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop


async def test_a_loop_that_keeps_failing_is_trouble_until_it_succeeds(keeper: Keeper) -> None:
    changes: list[str | None] = []
    keeper.on_change = changes.append
    rounds = Rounds(range(Keeper.MOST_FAILURES + 3))
    loop = keeper.start("kind", rounds.run)
    await rounds.until(Keeper.MOST_FAILURES - 1)
    assert keeper.trouble is None
    await rounds.until(Keeper.MOST_FAILURES)
    assert keeper.trouble == "the loop 'kind' has failed 5 times in a row, last with RuntimeError"
    await rounds.until(Keeper.MOST_FAILURES + 5)
    assert keeper.trouble is None and len(changes) == 2 and changes[-1] is None
    loop.cancel()


async def test_a_loop_that_is_ended_is_no_trouble_any_more(keeper: Keeper) -> None:
    rounds = Rounds(range(1000))
    loop = keeper.start("kind", rounds.run)
    await rounds.until(Keeper.MOST_FAILURES + 1)
    assert keeper.trouble is not None
    loop.cancel()
    await asyncio.wait({loop})
    assert keeper.trouble is None


async def test_what_a_round_waits_for_may_be_cancelled(keeper: Keeper) -> None:
    awaited: list[asyncio.Future[None]] = []
    second = asyncio.Event()

    async def wait() -> None:
        if awaited:
            second.set()
        awaited.append(asyncio.get_running_loop().create_future())
        await awaited[-1]

    loop = keeper.start("kind", wait)
    await asyncio.sleep(0)
    awaited[0].cancel()
    await asyncio.wait_for(second.wait(), 60)
    assert keeper.failures == {"kind": 1} and not loop.done()
    loop.cancel()


async def test_a_promise_lets_go_of_its_maker_however_it_ends() -> None:
    loop, calls = asyncio.get_running_loop(), []
    cancelled, settled = Promise[int](loop=loop), Promise[int](loop=loop)
    for promise in (cancelled, settled):
        promise.when_cancelled = lambda: calls.append(1)
    assert cancelled.cancel() and not cancelled.cancel()
    settled.settle(3)
    assert not settled.cancel() and calls == [1]
    assert cancelled.when_cancelled is None and settled.when_cancelled is None
