"""The HTTP server, with its signals and its first log line left to ``main``, and the port of several."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import uvicorn
from fastapi import FastAPI

from tessera.frontend.group import ACCEPTING, CONNECTIONS, FrontendGroup, Seat
from tessera.frontend.http.connection import ConnectionLimits, GuardedProtocol, raise_descriptor_limit

log = logging.getLogger(__name__)

# Of connections that wait, before other events of the loop.
_AT_ONCE: Final = 16
# A frontend waits for so long for each connection that it has more than another one, which takes the next
# ones meanwhile, and takes one itself then. Of 512 that came at once four frontends took 126 to 130.
_EXCESS_SECONDS: Final = 0.002
_LONGEST_WAIT_SECONDS: Final = 0.02
# Without workers, while other frontends have some.
_IDLE_SECONDS: Final = 0.05
# Without descriptors or memory for another connection.
_FULL_SECONDS: Final = 1.0


class SharedPort:
    """Takes connections from the queue that all frontends of a group share, as many as the others take.

    All wake up for a connection, and the first takes it. A frontend that is frozen takes none, so that none
    waits for it; one that ends leaves the queue to the others.
    """

    def __init__(self, seat: Seat, group: FrontendGroup) -> None:
        self.own_port = seat.port
        self._group = group
        self._sockets = [socket.socket(fileno=number) for number in seat.sockets]
        for one in self._sockets:
            one.set_inheritable(False)
            one.setblocking(False)
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._arriving: set[asyncio.Task[None]] = set()
        self._connections: Callable[[], int] = lambda: 0
        self._protocol: Callable[[], asyncio.Protocol]

    def open(self, protocol: Callable[[], asyncio.Protocol], connections: Callable[[], int]) -> None:
        """Take connections from now on; ``connections`` says how many are open."""
        self._protocol, self._connections = protocol, connections
        self._group.words[self._group.base + ACCEPTING] = 1
        for one in self._sockets:
            self._listen(one)
            log.info("listening on http://%s:%d", *one.getsockname()[:2])

    async def close(self) -> None:
        """Take no more; those in the queue are the other frontends'."""
        self._group.words[self._group.base + ACCEPTING] = 0
        for timer in self._waiting.values():
            timer.cancel()
        for one in self._sockets:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        if self._arriving:
            await asyncio.wait(self._arriving)

    def count(self) -> None:
        """Tell the others how many connections are open."""
        words, base = self._group.words, self._group.base
        words[base + CONNECTIONS] = self._connections() + len(self._arriving)

    def _listen(self, one: socket.socket, patient: bool = False) -> None:
        self._waiting.pop(one, None)
        asyncio.get_running_loop().add_reader(one, self._take, one, patient)

    def _wait(self, one: socket.socket, seconds: float, patient: bool = False) -> None:
        """Look no more for some time; the next connection then is taken in any case by a ``patient`` one."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(one)
        self._waiting[one] = loop.call_later(seconds, self._listen, one, patient)

    def _take(self, one: socket.socket, patient: bool) -> None:
        group = self._group
        for _ in range(_AT_ONCE):
            if group.leaves_work():
                return self._wait(one, _IDLE_SECONDS)
            excess = group.excess()
            if excess and not patient:
                return self._wait(one, min(excess * _EXCESS_SECONDS, _LONGEST_WAIT_SECONDS), True)
            try:
                taken, _ = one.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                log.error("cannot take a connection: %s", error)
                return self._wait(one, _FULL_SECONDS)
            task = asyncio.get_running_loop().create_task(self._serve(taken))
            self._arriving.add(task)
            self.count()
            if patient:
                break
        if patient:
            self._listen(one)

    async def _serve(self, taken: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, taken)
        except OSError:
            # The client has gone already.
            taken.close()
        finally:
            self._arriving.discard(task)
            self.count()


class HttpServer(uvicorn.Server):
    """Serves until ``should_exit``; requests in flight then have ``drain_seconds`` to finish.

    With a ``shared`` port it takes connections from there, and listens on ``port`` only where the seat says.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        host: str,
        port: int,
        drain_seconds: float,
        limits: ConnectionLimits,
        shared: SharedPort | None = None,
    ) -> None:
        raise_descriptor_limit()
        self._shared = shared
        changed = {"changed": shared.count} if shared else {}
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=shared.own_port if shared else port,
                http=partial(GuardedProtocol, limits=limits, **changed),  # type: ignore[arg-type]
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
        await super().startup([] if self._shared and not self._shared.own_port else sockets)
        for server in self.servers:
            for bound in server.sockets:
                host, port = bound.getsockname()[:2]
                log.info("listening on http://%s:%d", host, port)
        if self._shared:
            self._shared.open(self._protocol, lambda: len(self.server_state.connections))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._shared:
            await self._shared.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        # As the base class makes them for its own sockets.
        make = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]
