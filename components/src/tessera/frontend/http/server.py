"""The HTTP server, with its signals and its first log line left to ``main``, and the port of several."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Scope

from tessera.errors import ConfigError
from tessera.frontend.group import ACCEPTING, CONNECTIONS, FrontendGroup, Seat
from tessera.frontend.http.auth import Authenticator
from tessera.frontend.http.connection import (
    REFUSED_AT_ONCE,
    SKIPPING_SECONDS,
    Answer,
    Arrivals,
    ConnectionLimits,
    GuardedProtocol,
    max_connections,
    raise_descriptor_limit,
)
from tessera.frontend.http.tls import Certificate, shake_hands
from tessera.listening import listen
from tessera.terminal import place_of
from tessera.turns import Rounds

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
# For handshakes that are under way when no more connections are taken.
_LAST_HANDSHAKES_SECONDS: Final = 1.0
# For the answers of requests that are not waited for any longer.
_LAST_ANSWERS_SECONDS: Final = 1.0


class SharedPort:
    """Takes connections from the queue that all frontends of a group share, as many as the others take.

    All wake up for a connection, and the first takes it. A frontend that is frozen takes none, so that none
    waits for it; one that ends leaves the queue to the others. ``own_port`` is one on which this frontend
    alone answers as well; 0: none.
    """

    def __init__(
        self, sockets: Iterable[socket.socket], group: FrontendGroup | None = None, *, own_port: int = 0
    ) -> None:
        self.own_port = own_port
        self._group = group or FrontendGroup()
        self.sockets = list(sockets)
        for one in self.sockets:
            one.set_inheritable(False)
            one.setblocking(False)
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._arriving: dict[asyncio.Task[None], socket.socket | None] = {}
        """With each its socket, until its protocol or its handshake has that."""
        self._connections: Callable[[], int] = lambda: 0
        self._protocol: Callable[[], asyncio.Protocol]
        self._limits: ConnectionLimits
        self._certificate: Certificate | None

    @classmethod
    def of(cls, seat: Seat, group: FrontendGroup) -> SharedPort:
        """The one that the launcher opened."""
        sockets = [socket.socket(fileno=number) for number in seat.sockets]
        return cls(sockets, group, own_port=seat.port)

    def open(
        self,
        protocol: Callable[[], asyncio.Protocol],
        connections: Callable[[], int],
        limits: ConnectionLimits,
        certificate: Certificate | None = None,
    ) -> None:
        """Take connections from now on, by TLS with a certificate; ``connections`` says how many are open."""
        self._protocol, self._connections = protocol, connections
        self._limits, self._certificate = limits, certificate
        self._group.words[self._group.base + ACCEPTING] = 1
        for one in self.sockets:
            self._listen(one)
            scheme = "https" if certificate else "http"
            log.info("listening on %s://%s", scheme, place_of(*one.getsockname()[:2]))

    async def close(self) -> None:
        """Take no more; those in the queue are the other frontends'."""
        self._group.words[self._group.base + ACCEPTING] = 0
        for timer in self._waiting.values():
            timer.cancel()
        for one in self.sockets:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        if self._arriving:
            _, late = await asyncio.wait(set(self._arriving), timeout=_LAST_HANDSHAKES_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

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
            if self._connections() + len(self._arriving) >= max_connections() + REFUSED_AT_ONCE:
                # Of those that shake hands no other limit knows.
                taken.close()
                continue
            task = asyncio.get_running_loop().create_task(self._serve(taken))
            self._arriving[task] = taken
            # Not in the task, which does not run at all when it is cancelled before its first step.
            task.add_done_callback(self._arrived)
            self.count()
            if patient:
                break
        if patient:
            self._listen(one)

    async def _serve(self, taken: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._arriving[task] = None
        try:
            if self._certificate is None:
                await asyncio.get_running_loop().connect_accepted_socket(self._protocol, taken)
            else:
                await shake_hands(
                    taken,
                    self._certificate.accepted.context,
                    self._protocol,
                    seconds=self._limits.header_seconds,
                    write_seconds=self._limits.write_seconds,
                )
        except OSError as error:
            # The client has gone already, or speaks something else than TLS.
            log.debug("a connection came to nothing: %s", error)
            taken.close()

    def _arrived(self, task: asyncio.Task[None]) -> None:
        if (taken := self._arriving.pop(task)) is not None:
            taken.close()
        self.count()


class HttpServer(uvicorn.Server):
    """Serves until ``should_exit``; requests in flight then have ``drain_seconds`` to finish.

    With a ``shared`` port it takes connections from there, and listens on ``port`` only where that says so.
    With a ``certificate`` it answers by TLS alone. ``refuse`` answers requests that need no application, by
    their heads. Where many come together, clients take turns by the names of their ``keys``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        drain_seconds: float,
        limits: ConnectionLimits,
        shared: SharedPort | None = None,
        certificate: Certificate | None = None,
        refuse: Callable[[Scope], Answer | None] = lambda scope: None,
        keys: Authenticator | None = None,
    ) -> None:
        raise_descriptor_limit()
        self._shared, self._limits, self._certificate = shared, limits, certificate
        self.ports = [shared] if shared else []
        """Those whose connections are taken here, and not by the event loop."""
        self._renewal: asyncio.Task[None] | None = None
        changed = {"changed": shared.count} if shared else {}
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=shared.own_port if shared else port,
                http=partial(
                    GuardedProtocol,
                    limits=limits,
                    refuse=refuse,
                    keys=keys,
                    rounds=Arrivals(),
                    skips=Rounds(SKIPPING_SECONDS),
                    **changed,
                ),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
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
        # The loop's own servers neither count handshakes nor take another certificate.
        listens = self.config.port if not self._shared else self._shared.own_port
        if self._certificate is not None:
            self._renewal = self._certificate.watch()
            if listens or not self._shared:
                self.ports.append(SharedPort(listening(self.config.host, listens)))
            sockets = []
        elif self._shared and not listens:
            sockets = []
        await super().startup(sockets)
        for server in self.servers:
            for bound in server.sockets:
                log.info("listening on http://%s", place_of(*bound.getsockname()[:2]))
        for port in self.ports:
            port.open(
                self._protocol,
                lambda: len(self.server_state.connections),
                self._limits,
                self._certificate,
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        for port in self.ports:
            await port.close()
        await super().shutdown(sockets)
        if self.server_state.tasks:
            # They were cancelled, and their clients are told so.
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_ANSWERS_SECONDS)

    def _protocol(self) -> asyncio.Protocol:
        # As the base class makes them for its own sockets.
        make = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]


def listening(host: str, port: int, flag: str = "") -> list[socket.socket]:
    """Return the sockets of ``listen``; raises ``ConfigError``, which begins with the ``flag``."""
    try:
        return listen(host, port)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"{flag}cannot listen on {place_of(host, port)}: {error}") from error
