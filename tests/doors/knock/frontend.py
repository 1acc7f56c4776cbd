"""The door in one frontend: routes that tell what the middleware did with a request, and a listener."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.exchange import exchange_of
from tessera.frontend.http.errors import Failure
from tessera.frontend.http.tls import Certificate
from tessera.frontend.service import ClientApi, Service
from tests.doors.knock.settings import KnockSettings

log = logging.getLogger("tessera.knock")


def write_error(failure: Failure) -> tuple[int, dict[str, object]]:
    return failure.status, {"knock": failure.error["code"]}


class Knock:
    """Says its word to each connection, and then what that says."""

    def __init__(self, settings: KnockSettings, service: Service) -> None:
        self._settings, self._service = settings, service
        self._server: asyncio.Server | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._released = asyncio.Event()

    @property
    def apis(self) -> tuple[ClientApi, ...]:
        return (
            ClientApi(
                "Knock",
                self._routes,
                error=write_error,
                waits_below=("/knock/wait/",),
                open_paths=frozenset(("/knock",)),
            ),
        )

    def _routes(self, service: Service) -> list[ApiRoute]:
        async def knock(request: Request) -> Response:
            return JSONResponse({"word": self._settings.word, "models": len(list(service.models))})

        async def release(request: Request) -> Response:
            self._released.set()
            return JSONResponse({})

        async def hold(request: Request) -> Response:
            await self._released.wait()
            return JSONResponse({})

        async def wait(request: Request) -> Response:
            return JSONResponse({"has_a_place": exchange_of(request.scope).ticket is not None})

        return [
            ApiRoute("/knock", knock, methods=("GET",)),
            ApiRoute("/knock/release", release, methods=("GET",)),
            ApiRoute("/knock/hold", hold),
            ApiRoute("/knock/wait/{name}", wait),
        ]

    async def listen(self, certificate: Certificate | None) -> None:
        if self._settings.port:
            host = self._service.settings.host
            self._server = await asyncio.start_server(self._take, host, self._settings.port)
            log.info("knock on %s:%d", host, self._settings.port)

    async def drain(self, seconds: float) -> None:
        if self._server is not None:
            self._server.close()
            log.info("nobody else may knock")
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=seconds)

    def close(self) -> None:
        log.info("nobody is knocking")

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        writer.write(f"{self._settings.word}\n".encode())
        writer.write(await reader.readline())
        writer.close()
