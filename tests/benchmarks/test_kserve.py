"""What the clients beside perf_analyzer count."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer
from benchmarks.kserve import ask

_SECONDS = 0.3


async def test_a_rate_is_of_the_time_until_the_last_answer() -> None:
    async def late(_: web.Request) -> web.Response:
        await asyncio.sleep(3 * _SECONDS)
        return web.Response()

    application = web.Application()
    application.router.add_post("/v1/embeddings", late)
    async with TestServer(application) as server:
        point = await ask(str(server.make_url("")).rstrip("/"), [b"{}"], 2, _SECONDS)
    assert point.rows == 2 and point.rate < point.rows / (2 * _SECONDS)
