"""The HTTP server, with its signals and its first log line left to ``main``."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI

from tessera.frontend.http.connection import ConnectionLimits, GuardedProtocol, raise_descriptor_limit

log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Serves until ``should_exit``; requests in flight then have ``drain_seconds`` to finish."""

    def __init__(
        self, app: FastAPI, *, host: str, port: int, drain_seconds: float, limits: ConnectionLimits
    ) -> None:
        raise_descriptor_limit()
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=partial(GuardedProtocol, limits=limits),  # type: ignore[arg-type]
                ws="none",
                # Its own configuration would write lines of another form, past ours.
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=int(drain_seconds),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The base class raises the signal again after its shutdown, which would end the process before
        # the rest of it was closed.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for bound in server.sockets:
                host, port = bound.getsockname()[:2]
                log.info("listening on http://%s:%d", host, port)
