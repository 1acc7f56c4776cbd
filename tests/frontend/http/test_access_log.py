"""How much is written about a flood."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from starlette.types import Message, Scope

from tessera.frontend.admission.rate import RateLimiter
from tessera.frontend.admission.room import Admission, Capacity
from tessera.frontend.exchange import Exchange, exchange_of
from tessera.frontend.http.access_log import RefusalLines
from tessera.frontend.http.auth import Authenticator, read_keys
from tessera.frontend.http.connection import Answer
from tessera.frontend.http.errors import openai_error
from tessera.frontend.http.middleware import RequestMiddleware
from tessera.frontend.metrics import FrontendMetrics
from tessera.logs import is_sampled
from tests.clock import Clock
from tests.frontend.alone import frontend_process


def test_ten_of_a_second_pass_and_the_others_are_told_once_it_is_over() -> None:
    clock = Clock()
    lines = RefusalLines(clock)
    assert sum(lines.passes() for _ in range(50)) == 10
    assert lines.left_out() == 0
    clock.now += 1.0
    assert (lines.left_out(), lines.left_out()) == (40, 0)
    assert sum(lines.passes() for _ in range(7)) == 7
    clock.now += 5.0
    assert lines.left_out() == 0


async def test_every_refusal_is_answered_and_counted_and_few_are_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "tessera.frontend.access")
    metrics = FrontendMetrics()
    keys = Authenticator(read_keys(None, "a-known-key known"))
    limiter = RateLimiter(["known"], requests_per_minute=0, tokens_per_minute=0)

    async def app(scope: Scope, receive: object, send: object) -> None:
        raise AssertionError("an unknown key got in")

    capacity = Capacity(lambda: 1000, lambda: 10, unknown=1000)
    admission = Admission(max_requests=1000, max_response_bytes=1 << 30)
    admission.open_room("m", capacity)
    shapes = {"/v1/embeddings": openai_error}
    gate = RequestMiddleware(
        app, keys=keys, limiter=limiter, admission=admission, metrics=metrics, error_shapes=shapes
    )
    statuses: list[int] = []

    async def ask(path: str = "/v1/embeddings") -> None:
        async def receive() -> Message:
            raise AssertionError("the body was read")

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"authorization", b"Bearer an-unknown-key")]
        await gate({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)

    for _ in range(200):
        await ask()
    assert statuses == [401] * 200
    written = [record for record in caplog.records if record.getMessage() == "POST /v1/embeddings 401"]
    assert 10 <= len(written) < 200
    value = metrics.registry.get_sample_value("tessera_refused_total", {"why": "unknown key"})
    assert value == 200
    labels = {"route": "/v1/embeddings", "status": "401", "model": ""}
    assert metrics.registry.get_sample_value("tessera_requests_total", labels) == 200
    await asyncio.sleep(1.1)
    await ask("/nowhere/at/all")
    labels = {"route": "other", "status": "401", "model": ""}
    assert metrics.registry.get_sample_value("tessera_requests_total", labels) == 1
    told = [record for record in caplog.records if "more requests were refused" in record.getMessage()]
    assert told and sum(int(record.getMessage().split()[0]) for record in told) == 200 - len(written)


async def test_a_flood_is_refused_at_once_and_alike(caplog: pytest.LogCaptureFixture) -> None:
    """What is answered without the application differs from what it answers in the request's id alone."""
    caplog.set_level(logging.DEBUG, "tessera.frontend.access")
    metrics = FrontendMetrics()
    keys = Authenticator(read_keys(None, "a-known-key known"))
    limiter = RateLimiter(["known"], requests_per_minute=0, tokens_per_minute=0)
    admission = Admission(max_requests=1, max_response_bytes=1 << 30)
    admission.open_room("m", Capacity(lambda: 1000, lambda: 10, unknown=1000))
    held = [admission.enter("someone")]
    reached = 0

    async def app(scope: Scope, receive: object, send: object) -> None:
        nonlocal reached
        reached += 1

    gate = RequestMiddleware(
        app,
        keys=keys,
        limiter=limiter,
        admission=admission,
        metrics=metrics,
        error_shapes={"/v1/embeddings": openai_error, "/v2/models/m/infer": openai_error},
        waiting={"/v2/": openai_error},
    )

    def scope(key: bytes = b"a-known-key", path: str = "/v1/embeddings", method: str = "POST") -> Scope:
        headers = [
            (b"authorization", b"Bearer " + key),
            (b"x-request-id", b"mine"),
            (b"content-length", b"9"),
        ]
        return {"type": "http", "method": method, "path": path, "headers": headers, "state": {}}

    async def ask() -> Answer:
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        async def receive() -> Message:
            raise AssertionError("the body was read")

        await gate(scope(), receive, send)
        start, body = messages
        return Answer(start["status"], start["headers"], body["body"])

    # A clock of its own: the second in which this happens must not end.
    gate._log.refusals = RefusalLines(clock := Clock())
    assert gate.refuse_at_once(scope()) is None, "the first ones get a line"
    asked = [await ask() for _ in range(10)]
    assert len(written(caplog)) == 10
    refused = [gate.refuse_at_once(scope()) for _ in range(5)]
    assert {repr(answer) for answer in refused} == {repr(answer) for answer in asked}
    assert asked[0].status == 429 and dict(asked[0].headers)[b"retry-after"] == b"1"
    assert len(written(caplog)) == 10
    # What is refused for another reason, waits, or is no work goes the long way.
    assert gate.refuse_at_once(scope(key=b"an-unknown-key")) is None
    assert gate.refuse_at_once(scope(path="/v2/models/m/infer")) is None
    assert gate.refuse_at_once(scope(path="/nowhere")) is None
    assert gate.refuse_at_once(scope(method="GET")) is None
    value = metrics.registry.get_sample_value
    assert value("tessera_refused_total", {"why": "full"}) == 15
    labels = {"route": "/v1/embeddings", "status": "429", "model": ""}
    assert value("tessera_requests_total", labels) == 15
    clock.now += 1.0
    assert gate.refuse_at_once(scope()) is None, "somebody has to say how many got no line"
    await ask()
    assert "5 more requests were refused unread within a second" in caplog.messages
    for _ in range(10):
        await ask()
    held.pop().close()
    assert gate.refuse_at_once(scope()) is None, "there is room again"
    assert reached == 0 and admission.requests.used == 0


def written(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage() == "POST /v1/embeddings 429"]


async def test_a_connection_keeps_nothing_of_a_body_or_an_error() -> None:
    """It keeps the scope of its last request until the next one comes."""
    admission = Admission(max_requests=1, max_response_bytes=1 << 30)
    admission.open_room("m", Capacity(lambda: 1000, lambda: 10, unknown=1000))
    seen: list[Exchange] = []

    async def app(scope: Scope, receive: object, send: object) -> None:
        exchange = exchange_of(scope)
        exchange.body = b"{}"
        seen.append(exchange)
        raise RuntimeError("odd")

    gate = RequestMiddleware(
        app,
        keys=None,
        limiter=None,
        admission=admission,
        metrics=FrontendMetrics(),
        error_shapes={"/v1/embeddings": openai_error},
    )
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError("the body was read")

    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": [], "state": {}}
    await gate(scope, receive, send)
    (exchange,) = seen
    assert messages[0]["status"] == 500 and exchange.failure is not None
    assert exchange.body is None and exchange.unexpected is None and exchange.ticket is None


def test_a_share_of_the_requests_is_written_by_all_processes_alike() -> None:
    ids = [f"request-{number}" for number in range(20_000)]
    for share in (0.0, 0.01, 0.3, 1.0):
        chosen = {request_id for request_id in ids if is_sampled(request_id, share)}
        assert len(chosen) == pytest.approx(share * len(ids), rel=0.2)
        assert chosen == {request_id for request_id in ids if is_sampled(request_id, share)}


@pytest.mark.service
def test_a_frontend_without_an_access_log_writes_failures_alone(checkpoint: Path, tmp_path: Path) -> None:
    with frontend_process(checkpoint, tmp_path, "--access-log-share", "0") as alone:
        assert alone.http.post("/v1/embeddings", json={"colour": "blue"}).status_code == 400
        assert alone.http.post("/v1/embeddings", json={"input": "a text"}).status_code == 503
    lines = [line for line in alone.log.read_text().splitlines() if "tessera.frontend.access" in line]
    assert len(lines) == 1 and "503" in lines[0]
