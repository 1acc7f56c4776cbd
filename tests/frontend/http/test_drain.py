"""A request that a draining server no longer waits for is answered like every other refusal."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tessera.frontend.admission.room import Admission, Capacity
from tessera.frontend.http.connection import ConnectionLimits
from tessera.frontend.http.middleware import RequestMiddleware
from tessera.frontend.http.server import HttpServer
from tessera.frontend.metrics import FrontendMetrics
from tests.waiting import until

_LIMITS = ConnectionLimits(header_seconds=10.0, header_bytes=4096, keep_alive_seconds=5.0)


async def test_what_is_not_done_when_the_drain_ends_gets_503(caplog: pytest.LogCaptureFixture) -> None:
    waiting = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal waiting
        waiting += 1
        await asyncio.Event().wait()

    metrics = FrontendMetrics()
    admission = Admission(max_requests=100, max_response_bytes=1 << 30)
    admission.open_room("m", Capacity(lambda: 1000, lambda: 10, unknown=1000))
    server: HttpServer
    gate = RequestMiddleware(
        app,
        keys=None,
        limiter=None,
        admission=admission,
        metrics=metrics,
        drains=lambda: server.should_exit,
    )
    server = HttpServer(gate, host="127.0.0.1", port=0, drain_seconds=1, limits=_LIMITS)
    serving = asyncio.ensure_future(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        asked = [asyncio.ensure_future(client.post("/v1/embeddings", json={})) for _ in range(5)]
        await until(lambda: waiting == len(asked))
        server.should_exit = True
        answers = await asyncio.gather(*asked)
    await asyncio.wait_for(serving, 60)
    assert [answer.status_code for answer in answers] == [503] * len(asked)
    for answer in answers:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unavailable", None)
        assert "the service ends" in error["message"] and answer.headers["retry-after"]
    found = metrics.registry.get_sample_value(
        "tessera_errors_total", {"route": "other", "code": "unavailable", "model": ""}
    )
    assert found == len(asked)
    # One line says how many, and each request has its own; a traceback would be a fault of ours.
    assert [record for record in caplog.records if record.exc_info] == []
    assert sum("Cancel 5 running task" in record.getMessage() for record in caplog.records) == 1
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 1 + len(asked)
