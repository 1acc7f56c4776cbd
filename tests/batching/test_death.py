"""Fail engines outside ``launch`` and ``result``, and their threads: each entry is settled all the same."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tessera.batching import Batcher
from tessera.engine.guard import translate
from tessera.errors import EngineDead, EngineFailed
from tessera.launched import Launched
from tests.batching.conftest import MakeBatcher
from tests.waiting import until

WAIT = 60.0
ASSERTED = "CUDA error: device-side assert triggered"


def asserted() -> Exception:
    return torch.AcceleratorError(ASSERTED)


@dataclass
class BrokenEvent:
    """Is not done for ``good`` queries; then each query raises, and so does waiting."""

    good: int
    broken: threading.Event = field(default_factory=threading.Event)
    queries: int = 0

    def query(self) -> bool:
        self.queries += 1
        if self.queries > self.good:
            self.broken.set()
            raise asserted()
        return False

    def synchronize(self) -> None:
        if not self.broken.is_set():
            self.broken.wait(0.2)
        raise asserted()


@dataclass
class AssertingEngine:
    """Launches batches whose events raise as CUDA's do behind a device-side assert."""

    good: int
    sizes: list[int] = field(default_factory=list)

    def launch(self, payloads: Sequence[int]) -> Launched[list[int]]:
        self.sizes.append(len(payloads))
        batch: Launched[list[int]] = Launched.after(BrokenEvent(self.good), list, keep=payloads)
        # As the guard of every engine does, and behind it the stage.
        return batch.map_error(translate).map(list)


@dataclass
class Deaths:
    errors: list[EngineDead] = field(default_factory=list)

    def __call__(self, error: EngineDead) -> None:
        self.errors.append(error)


def submitted(batcher: Batcher[int, int], count: int) -> list[asyncio.Future[Any]]:
    """The results of so many payloads; those behind the end of the engine's thread are refused."""
    futures: list[asyncio.Future[Any]] = []
    for payload in range(count):
        try:
            futures.append(batcher.submit(payload, 5))
        except EngineDead as error:
            futures.append(asyncio.get_running_loop().create_future())
            futures[-1].set_exception(error)
    return futures


async def all_fail(futures: Sequence[asyncio.Future[object]], said: str) -> None:
    results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), WAIT)
    for result in results:
        assert isinstance(result, EngineDead) and said in result.message, result


@pytest.mark.parametrize("good", [0, 1, 11])
@pytest.mark.parametrize("depth", [1, 2])
async def test_an_event_that_raises_ends_the_engine_under_light_load(
    make_batcher: MakeBatcher, good: int, depth: int
) -> None:
    died = Deaths()
    batcher = make_batcher(AssertingEngine(good).launch, depth=depth, died=died)
    await all_fail([batcher.submit(1, 1)], ASSERTED)
    await until(lambda: died.errors)
    with pytest.raises(EngineDead, match="device-side assert"):
        batcher.submit(2, 1)
    assert len(died.errors) == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_an_event_that_raises_ends_the_engine_under_full_load(
    make_batcher: MakeBatcher, depth: int
) -> None:
    died, engine = Deaths(), AssertingEngine(3)
    batcher = make_batcher(engine.launch, depth=depth, budget=10, died=died)
    # As many as are in flight, those of the open batch, and a queue behind it.
    futures = submitted(batcher, 40)
    await all_fail(futures, ASSERTED)
    assert len(died.errors) == 1 and sum(engine.sizes) <= 2 * depth
    await asyncio.wait_for(batcher.close(), WAIT)


class Broken(Launched[list[int]]):
    """A batch one of whose members raises, whatever the contract says."""

    def __init__(self, member: str) -> None:
        super().__init__(list, done=lambda: False, tell=lambda call: None)
        self.member = member

    def _may(self, member: str) -> None:
        if self.member == member:
            raise RuntimeError(f"{member} is broken")

    @property
    def tells(self) -> bool:
        self._may("tells")
        return True

    def when_done(self, call: Callable[[], None]) -> None:
        self._may("when_done")

    def done(self) -> bool:
        self._may("done")
        return False


@pytest.mark.parametrize("member", ["tells", "when_done", "done"])
@pytest.mark.parametrize("load", [1, 40])
async def test_a_batch_that_breaks_the_contract_ends_the_engine(
    make_batcher: MakeBatcher, member: str, load: int, caplog: pytest.LogCaptureFixture
) -> None:
    died = Deaths()
    batcher = make_batcher(lambda payloads: Broken(member), depth=2, budget=10, died=died)
    await all_fail(submitted(batcher, load), f"{member} is broken")
    with pytest.raises(EngineDead):
        batcher.submit(1, 1, admitted=True)
    assert len(died.errors) == 1
    assert any(record.exc_info for record in caplog.records), "the log has the traceback"


async def test_what_tells_may_raise_and_fails_its_own_batch(make_batcher: MakeBatcher) -> None:
    def tell(call: Callable[[], None]) -> None:
        raise ValueError("nobody to tell")

    def launch(payloads: Sequence[int]) -> Launched[list[int]]:
        if payloads[0] < 0:
            return Launched(lambda: list(payloads), done=lambda: False, tell=tell).map(list)
        return Launched.of(list(payloads))

    batcher = make_batcher(launch, depth=2)
    with pytest.raises(EngineFailed, match="nobody to tell"):
        await asyncio.wait_for(batcher.submit(-1, 1), WAIT)
    assert (await batcher.submit(5, 1)).value == 5


@dataclass
class FailingClock:
    """Raises ``error`` at the given reading of the engine's thread, and once."""

    error: BaseException
    at: int
    readings: itertools.count[int] = field(default_factory=itertools.count)

    def __call__(self) -> float:
        if threading.current_thread().name.startswith("engine-") and next(self.readings) == self.at:
            raise self.error
        return time.perf_counter()


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("error", [MemoryError("no memory"), SystemExit("told to")], ids=["error", "exit"])
async def test_an_unforeseen_error_in_the_thread_ends_the_engine(
    make_batcher: MakeBatcher, at: int, depth: int, error: BaseException
) -> None:
    died = Deaths()
    batcher = make_batcher(
        lambda payloads: Launched.of([-payload for payload in payloads]),
        depth=depth,
        budget=10,
        clock=FailingClock(error, at),
        died=died,
    )
    futures = submitted(batcher, 20)
    results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), WAIT)
    # Those whose batch had ended have their results; each of the others says why it has none.
    failed = [result for result in results if isinstance(result, EngineDead)]
    assert failed and str(error) in failed[0].message
    good = [result for result in results if not isinstance(result, BaseException)]
    assert len(good) + len(failed) == len(futures)
    assert len(died.errors) == 1
    with pytest.raises(EngineDead):
        batcher.submit(1, 1)


async def test_cancelled_entries_are_given_back_when_the_engine_dies(make_batcher: MakeBatcher) -> None:
    given: list[int] = []
    engine = AssertingEngine(100)
    batcher = make_batcher(engine.launch, depth=2, budget=10)
    futures = [
        batcher.submit(payload, 5, on_cancelled=lambda payload=payload: given.append(payload))
        for payload in range(6)
    ]
    await until(lambda: engine.sizes)
    for future in futures:
        future.cancel()
    await until(lambda: len(given) == 6)
    assert sorted(given) == list(range(6))


def test_a_thread_whose_loop_is_closed_ends() -> None:
    entered, leave = threading.Event(), threading.Event()

    def launch(payloads: Sequence[int]) -> Launched[list[int]]:
        entered.set()
        assert leave.wait(WAIT)
        return Launched.of(list(payloads))

    async def begin() -> None:
        from tessera.batching import Batcher
        from tessera.engine.batch import packed_cost

        batcher: Batcher[int, int] = Batcher(
            "closed", launch, cost=packed_cost, budget=10, max_queued=100, depth=1
        )
        batcher.submit(1, 1)
        await until(entered.is_set)

    asyncio.run(begin())
    leave.set()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "engine-closed")
    thread.join(WAIT)
    assert not thread.is_alive()
