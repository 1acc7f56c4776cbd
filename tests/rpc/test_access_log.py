"""One line for each request that a worker has a part in, however many calls it comes in."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tessera import wire
from tessera.errors import EngineFailed, InvalidInput, Overloaded, TesseraError
from tessera.logs import JsonFormatter, count, note
from tessera.rpc import Server
from tessera.worker import access_log as module
from tessera.worker.access_log import AccessLog
from tests.rpc.conftest import INFO, Deployment, echo, echoed
from tests.waiting import until

Lines = list[dict[str, Any]]


class _Written(logging.Handler):
    """What a process would have written, line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter("embed"))
        self.lines: Lines = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, log = _Written(), logging.getLogger("tessera")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.removeHandler(handler)
    log.setLevel(before)


def named(request_id: str) -> wire.EmbedRequest:
    return msgspec.structs.replace(echo(8), request_id=request_id)


async def serve(
    deployment: Deployment, handler: Callable[[wire.Request], Awaitable[wire.Reply]], *, linger: float = 1.0
) -> tuple[Server, AccessLog]:
    access_log = AccessLog(deployment.address, handler, linger=linger)
    return await deployment.serve(access_log.answer), access_log


async def test_many_calls_of_one_request_are_one_line(deployment: Deployment, lines: Lines) -> None:
    async def handler(message: wire.Request) -> wire.Reply:
        if isinstance(message, wire.Describe):
            return INFO
        assert isinstance(message, wire.EmbedRequest)
        note(route="shm")
        count("encode_retries")
        logging.getLogger("tessera.inside").warning("something happened")
        await asyncio.sleep(0.01)
        timings = wire.Timings(queue_ms=2.0, embed_ms=3.0)
        return msgspec.structs.replace(echoed(message), cached_tokens=(1,), timings=timings)

    server, access_log = await serve(deployment, handler, linger=600.0)
    client = await deployment.client()
    await client.call(server.instance, wire.Describe(), timeout=60)
    calls = [client.call(server.instance, named("many"), timeout=60) for _ in range(3)]
    await asyncio.gather(*calls, client.call(server.instance, named("one"), timeout=60))
    await client.call(server.instance, named("many"), timeout=60)
    await until(lambda: server.in_flight == 0)
    access_log.flush()
    inside = [line for line in lines if line["target"] == "tessera.inside"]
    assert sorted(line["request_id"] for line in inside) == ["many"] * 4 + ["one"]
    (many,) = (line for line in lines if line["request_id"] == "many" and "call" in line)
    assert many["level"] == "INFO" and many["outcome"] == "ok" and many["endpoint"] == deployment.address
    assert (many["calls"], many["inputs"], many["tokens"], many["cached_tokens"]) == (4, 4, 8, 4)
    assert (many["queue_ms"], many["embed_ms"], many["route"], many["encode_retries"]) == (2.0, 3.0, "shm", 4)


async def test_who_is_to_blame_gives_the_level(deployment: Deployment, lines: Lines) -> None:
    raised: dict[str, Exception] = {
        "the caller's": InvalidInput("a secret text"),
        "full": Overloaded("full"),
        "ours": EngineFailed("out of memory"),
        "nobody foresaw it": ZeroDivisionError("a bug"),
    }
    failures = {0: wire.Failure.of(InvalidInput("no")), 1: wire.Failure.of(EngineFailed("broken"))}

    async def handler(message: wire.Request) -> wire.Reply:
        assert isinstance(message, wire.EmbedRequest)
        if message.request_id in raised:
            raise raised[message.request_id]
        return msgspec.structs.replace(echoed(message), failures=failures)

    server, _ = await serve(deployment, handler)
    client = await deployment.client()
    for name in (*raised, "partly ours"):
        with suppress(TesseraError):
            await client.call(server.instance, named(name), timeout=60)
    await until(lambda: len(lines) == 5)
    found = {line["request_id"]: line for line in lines}
    assert {name: (line["level"], line["outcome"]) for name, line in found.items()} == {
        "the caller's": ("INFO", "invalid_input"),
        "full": ("INFO", "overloaded"),
        "ours": ("ERROR", "engine_failed"),
        "nobody foresaw it": ("ERROR", "internal_error"),
        # A fault goes before a mistake.
        "partly ours": ("ERROR", "engine_failed"),
    }
    # What is said of a caller's mistake quotes the caller.
    assert {name for name, line in found.items() if "error" in line} == {
        name for name, line in found.items() if line["level"] == "ERROR"
    }
    assert [name for name, line in found.items() if "exception" in line] == ["nobody foresaw it"]
    assert "ZeroDivisionError" in found["nobody foresaw it"]["exception"]
    assert found["partly ours"]["failed_inputs"] == 2


async def test_a_caller_that_went_away_leaves_a_line(deployment: Deployment, lines: Lines) -> None:
    async def handler(message: wire.Request) -> wire.Reply:
        await asyncio.sleep(600)
        raise AssertionError

    server, _ = await serve(deployment, handler)
    client = await deployment.client()
    call = asyncio.ensure_future(client.call(server.instance, named("gone"), timeout=60))
    await until(lambda: server.in_flight == 1)
    call.cancel()
    await until(lambda: lines)
    (line,) = lines
    assert (line["outcome"], line["level"], line["request_id"]) == ("cancelled", "INFO", "gone")


async def test_stopping_writes_what_has_ended(deployment: Deployment, lines: Lines) -> None:
    async def handler(message: wire.Request) -> wire.Reply:
        return echoed(message)

    server, access_log = await serve(deployment, handler)
    client = await deployment.client()
    await client.call(server.instance, named("last"), timeout=60)
    await server.stop(timeout=0.0)
    access_log.flush()
    assert [line["request_id"] for line in lines] == ["last"]


async def test_an_id_that_never_rests_is_written_now_and_then(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.05)

    async def handler(message: wire.Request) -> wire.Reply:
        raise AssertionError

    made = AccessLog("endpoint", handler, linger=10.0)
    message = named("constant")
    first = made.begin(message)
    await asyncio.sleep(0.1)
    second = made.begin(message)
    assert second is not first
    made.end(first, message, echoed(message))
    made.end(second, message, echoed(message))
    made.flush()
    assert [line["calls"] for line in lines] == [1, 1]


async def test_a_line_that_cannot_be_written_holds_up_no_other(deployment: Deployment, lines: Lines) -> None:
    class Odd(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.removeHandler(self)
            raise RuntimeError("odd")

    async def handler(message: wire.Request) -> wire.Reply:
        return INFO if isinstance(message, wire.Describe) else echoed(message)

    log = logging.getLogger("tessera")
    access_log = AccessLog("somewhere", handler, linger=0.01)
    log.addHandler(Odd())
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
    await access_log.answer(named("one"))
    await until(lambda: failed)
    await access_log.answer(named("two"))
    await until(lambda: [line for line in lines if line.get("request_id") == "two"])
