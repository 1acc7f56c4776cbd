"""How much is written about a flood."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.types import Message, Scope

from tessera.frontend.http.access_log import RefusalLines
from tessera.frontend.http.admission import Admission, Capacity, RateLimiter
from tessera.frontend.http.auth import Authenticator, read_keys
from tessera.frontend.http.errors import openai_error
from tessera.frontend.http.middleware import RequestMiddleware
from tessera.frontend.metrics import FrontendMetrics
from tests.clock import Clock


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
    limiter = RateLimiter(keys.names, requests_per_minute=0, tokens_per_minute=0)

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
