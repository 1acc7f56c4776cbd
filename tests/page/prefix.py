"""A proxy that puts a service under a path, as ingresses do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.e2e.service import free_ports
from tests.waiting import wait_until


@contextmanager
def under_prefix(url: str, prefix: str) -> Iterator[str]:
    """Forward ``prefix`` and what is below it to ``url``, without the prefix."""

    async def forward(request: Request) -> Response:
        path = request.url.path.removeprefix(prefix) or "/"
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.request(
                request.method, url + path, content=await request.body(), headers=request.headers.raw
            )
        return Response(answer.content, answer.status_code, headers=dict(answer.headers))

    (port,) = free_ports(1)
    routes = [Route(prefix + rest, forward, methods=["GET", "POST"]) for rest in ("", "/{path:path}")]
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    assert server.started
    yield f"http://127.0.0.1:{port}{prefix}"
    server.should_exit = True
    thread.join(timeout=60)
