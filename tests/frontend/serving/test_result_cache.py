"""The result cache in front of an embedder that counts what reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tessera import wire
from tessera.errors import DeadlineExceeded, EngineFailed, InvalidInput, TesseraError, Unavailable
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.serving.dispatch import Answer, Call
from tessera.frontend.serving.result_cache import ResultCache
from tessera.models.base import SCORES, Output, OutputKind, Outputs
from tessera.tasks import Deadline
from tests.waiting import all_turns

OUTPUT = Output(kind=OutputKind.VECTOR, width=8)


class Counting:
    """Gives each item rows made from its tokens; waits while ``gate`` is closed."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.calls: list[list[bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled = 0
        self.error: TesseraError | None = None
        self.odd = b""

    async def embed(self, items: Sequence[wire.Item], call: Call) -> Answer:
        queries = call.queries
        self.calls.append([item.tokens for item in items])
        if self.odd in self.calls[-1]:
            raise RuntimeError("odd")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.error, Unavailable):
            raise self.error
        answer = Answer.empty(items, SCORES if queries else self.output)
        for index, item in enumerate(items):
            compared = queries[item.query][0] if queries else 0
            answer.rows.values[answer.rows.places([index])] = item.tokens[0] + compared
        answer.rows.norms[:] = answer.rows.values[:, 0] / 2
        if self.error is not None:
            kind = type(self.error)
            answer.errors = {index: kind("bad", param=item.param) for index, item in enumerate(items)}
        return answer


def item(
    value: int,
    *images: bytes,
    param: str = "input",
    grid: tuple[int, int, int] | None = None,
    tokens: int = 1,
) -> wire.Item:
    pictures = tuple(
        wire.Image(digest=digest, data=b"x", units=2, rows=8, grid=grid, param=param) for digest in images
    )
    return wire.Item(tokens=bytes((value, 0, 0, 0)) * tokens, images=pictures, param=param)


class Cached:
    def __init__(self, capacity: int = 1 << 20, output: Output = OUTPUT) -> None:
        self.behind = Counting(output)
        self.key_prefix = b"model"
        self.workers = 1
        self.cache = ResultCache(
            self.behind,
            FrontendMetrics().of("m"),
            capacity=capacity,
            outputs=Outputs([output]),
            key_prefix=lambda: self.key_prefix,
            flight_seconds=30,
            workers=lambda: self.workers,
        )

    async def ask(self, *items: wire.Item, seconds: float = 30, queries: Sequence[bytes] = ()) -> Answer:
        call = Call(request_id="r", deadline=Deadline.after(seconds), queries=queries)
        return await self.cache.embed(items, call)


async def test_one_batch_for_what_is_missing_and_none_for_the_rest() -> None:
    cached = Cached()
    first = await cached.ask(item(1), item(2), item(1))
    assert cached.behind.calls == [[item(1).tokens, item(2).tokens]]
    second = await cached.ask(item(2), item(3), item(1))
    assert cached.behind.calls[1:] == [[item(3).tokens]]
    assert first.rows.values[:, 0].tolist() == [1, 2, 1]
    assert second.rows.values[:, 0].tolist() == [2, 3, 1]
    assert first.rows.norms.tolist() == [0.5, 1, 0.5]
    assert second.rows.norms.tolist() == [1, 1.5, 0.5]
    assert not first.errors
    assert not second.errors


async def test_rows_for_each_token_come_back_whole() -> None:
    cached = Cached(output=Output(kind=OutputKind.TOKENS, width=4))
    first = await cached.ask(item(1, tokens=3), item(2), item(3, tokens=2))
    assert first.rows.bounds.tolist() == [0, 3, 4, 6]
    assert first.rows.values[:, 0].tolist() == [1, 1, 1, 2, 3, 3]
    assert cached.cache.nbytes > 6 * (4 + 1) * 4
    second = await cached.ask(item(4, tokens=2), item(3, tokens=2), item(1, tokens=3))
    assert second.rows.values[:, -1].tolist() == [4, 4, 3, 3, 1, 1, 1]
    assert second.rows.norms.tolist() == [2, 2, 1.5, 1.5, 0.5, 0.5, 0.5]
    assert [len(call) for call in cached.behind.calls] == [3, 1]


async def test_a_score_is_of_one_query() -> None:
    cached = Cached(output=Output(kind=OutputKind.TOKENS, width=4))
    rows = await cached.ask(item(1, tokens=3))
    pairs = [msgspec.structs.replace(item(1, tokens=3), query=query) for query in (0, 1, 0)]
    scores = await cached.ask(*pairs, queries=[b"a", b"b"])
    assert (rows.rows.values.shape, scores.rows.values.tolist()) == ((3, 4), [[98], [99], [98]])
    again = await cached.ask(*pairs[:2], queries=[b"b", b"c"])
    assert again.rows.values.tolist() == [[99], [100]]
    assert [len(call) for call in cached.behind.calls] == [1, 2, 1]


async def test_everything_that_rows_depend_on_is_in_the_key() -> None:
    cached = Cached()
    different = [item(1), item(1, b"a" * 32), item(1, b"b" * 32), item(1, b"a" * 32, b"b" * 32), item(2)]
    different += [item(1, b"a" * 32, grid=grid) for grid in ((1, 2, 4), (1, 4, 2))]
    for one in different:
        await cached.ask(one)
    assert len(cached.behind.calls) == len(different)
    hit = await cached.ask(item(1, b"a" * 32, b"b" * 32, param="input[7]"))
    assert hit.cached_tokens == [16]
    cached.key_prefix = b"another model"
    await cached.ask(item(1))
    assert len(cached.behind.calls) == len(different) + 1


async def test_concurrent_requests_share_one_computation() -> None:
    cached = Cached()
    cached.behind.gate.clear()
    asking = [asyncio.ensure_future(cached.ask(item(1), item(2))) for _ in range(5)]
    await all_turns()
    cached.behind.gate.set()
    answers = await asyncio.gather(*asking)
    assert len(cached.behind.calls) == 1
    assert all(answer.rows.values[:, 0].tolist() == [1, 2] for answer in answers)


async def test_the_first_to_ask_may_leave_and_the_last_cancels_the_work() -> None:
    cached = Cached()
    cached.behind.gate.clear()
    leader = asyncio.ensure_future(cached.ask(item(1), item(2)))
    await all_turns()
    joined = asyncio.ensure_future(cached.ask(item(1)))
    await all_turns()
    leader.cancel()
    await asyncio.gather(leader, return_exceptions=True)
    await all_turns()
    assert cached.behind.cancelled == 0
    late = asyncio.ensure_future(cached.ask(item(3)))
    await all_turns()
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    await all_turns()
    assert cached.behind.cancelled == 1
    cached.behind.gate.set()
    assert (await joined).rows.values[0, 0] == 1


async def test_no_worker_is_not_the_requests_time_running_out() -> None:
    cached = Cached()
    cached.behind.gate.clear()
    assert isinstance((await cached.ask(item(1), seconds=0.05)).errors[0], DeadlineExceeded)
    cached.workers = 0
    assert isinstance((await cached.ask(item(2), seconds=0.05)).errors[0], Unavailable)
    cached.behind.gate.set()


async def test_each_keeps_its_own_deadline() -> None:
    cached = Cached()
    cached.behind.gate.clear()
    patient = asyncio.ensure_future(cached.ask(item(1)))
    hasty = await cached.ask(item(1), seconds=0.05)
    assert hasty.errors[0].code == "deadline_exceeded"
    cached.behind.gate.set()
    assert not (await patient).errors


async def test_errors_are_nobody_elses_and_are_not_kept() -> None:
    cached = Cached()
    cached.behind.error = InvalidInput("bad")
    cached.behind.gate.clear()
    asking = [asyncio.ensure_future(cached.ask(item(1, param=name))) for name in ("input[0]", "texts[4]")]
    await all_turns()
    cached.behind.gate.set()
    answers = await asyncio.gather(*asking)
    assert [answer.errors[0].param for answer in answers] == ["input[0]", "texts[4]"]
    # What the service failed at is told to all who wait for it, each by its own name for the input.
    cached.behind.error, calls = EngineFailed("bad"), len(cached.behind.calls)
    answers = await asyncio.gather(
        cached.ask(item(1, param="input[0]"), item(1, param="input[1]")),
        cached.ask(item(1, param="texts[4]")),
    )
    assert [error.param for answer in answers for error in answer.errors.values()] == [
        "input[0]",
        "input[1]",
        "texts[4]",
    ]
    assert len(cached.behind.calls) == calls + 1
    cached.behind.error = Unavailable("gone")
    assert (await cached.ask(item(1))).errors[0].code == "unavailable"
    cached.behind.error = None
    assert not (await cached.ask(item(1))).errors


async def test_an_unexpected_error_leaves_nothing_waiting() -> None:
    cached = Cached()
    cached.behind.gate.clear()
    leader = asyncio.ensure_future(cached.ask(item(1)))
    await all_turns()
    cached.behind.odd = item(2).tokens
    # Its first input joins the other request's.
    with pytest.raises(RuntimeError, match="odd"):
        await cached.ask(item(1), item(2))
    leader.cancel()
    await asyncio.gather(leader, return_exceptions=True)
    await all_turns()
    assert cached.behind.cancelled == 1


@pytest.mark.parametrize("entries", [0, 1, 3])
async def test_bytes_are_bounded_and_the_least_recently_used_goes(entries: int) -> None:
    one = Cached()
    await one.ask(item(1))
    cached = Cached(capacity=one.cache.nbytes * entries)
    for value in (1, 2, 3, 1, 4):
        await cached.ask(item(value))
    assert cached.cache.nbytes <= one.cache.nbytes * entries
    before = len(cached.behind.calls)
    await cached.ask(item(1))
    assert len(cached.behind.calls) - before == (0 if entries == 3 else 1)
