"""Serves one endpoint: decodes, runs, answers, and stays listed in discovery."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any, Final

from tessera import wire
from tessera.errors import RequestCancelled, TesseraError, Unavailable, internal_error
from tessera.rpc.pieces import PIECE_BYTES, Cut
from tessera.rpc.runtime import Runtime, send_at_once
from tessera.tasks import KEEPER

log = logging.getLogger(__name__)

Handler = Callable[[wire.Request], Awaitable[wire.Reply]]

UNREGISTER_SECONDS = 3.0
_DROPPED: Final = wire.Failure.of(RequestCancelled("the call was cancelled"))


# Replies of more bytes do not wait for each other.
_CHUNK_BYTES: Final = 1 << 20


class _Joint:
    """The requests of one ``Calls``, all begun at once, and their replies as they are ready."""

    def __init__(self, calls: wire.Calls, server: Server) -> None:
        self._server = server
        self._ready: dict[int, wire.Reply] = {}
        self._running: dict[int, asyncio.Future[wire.Reply]] = {}
        self._woken: asyncio.Future[None] | None = None
        self._cut: list[Cut] = []
        for position, request in enumerate(calls.requests):
            key = calls.caller, calls.first + position
            reply = self._running[position] = server.running[key] = server.begin(request)
            reply.add_done_callback(partial(self._ended, position, key))

    async def payloads(self) -> AsyncIterator[bytes]:
        """Replies as they are ready. Of those that go in pieces the one goes on that has the least left."""
        while True:
            if not self._cut and not self._ready and self._running:
                self._woken = asyncio.get_running_loop().create_future()
                await self._woken
            if replies := self._take():
                payload = wire.encode(wire.Replies(replies=replies))
                del replies
                if len(payload) <= PIECE_BYTES:
                    yield payload
                else:
                    self._cut.append(Cut(next(self._server.numbers), payload))
                    self._server.under_way += 1
                del payload
            elif self._cut:
                yield self._next_piece()
            else:
                return

    def _next_piece(self) -> bytes:
        first = min(self._cut, key=lambda payload: payload.left)
        piece = first.next()
        if not first.left:
            self._cut.remove(first)
            self._server.under_way -= 1
        return piece

    def _take(self) -> dict[int, wire.Reply]:
        """Replies that are ready; what is long comes alone."""
        size = 0
        chunk: dict[int, wire.Reply] = {}
        for position, reply in list(self._ready.items()):
            size += reply.size
            if chunk and size > _CHUNK_BYTES:
                break
            chunk[position] = self._ready.pop(position)
        return chunk

    def stop(self, _: object = None) -> None:
        """Cancel what is not done. The caller, if it still listens, is told so."""
        for reply in self._running.values():
            reply.cancel()

    def end(self) -> None:
        """Nothing is sent any more."""
        self.stop()
        self._server.under_way -= len(self._cut)

    def _ended(self, position: int, key: tuple[int, int], reply: asyncio.Future[wire.Reply]) -> None:
        del self._running[position]
        self._server.running.pop(key, None)
        self._ready[position] = _DROPPED if reply.cancelled() else self._server.reply(reply)
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


class Server:
    """One endpoint instance of this process.

    A handler's errors travel as ``Failure`` replies; a caller that goes away cancels its handler. The
    instance leaves discovery first when it stops, so that what is in flight can finish undisturbed.
    ``running`` has the replies to come by their caller and number; ``under_way`` counts long ones that are
    being sent, and what a server of another kind answers.
    """

    def __init__(self, runtime: Runtime, address: str, handler: Handler) -> None:
        self._endpoint: Any = runtime.endpoint(address)
        self._handler = handler
        self._runtime = runtime
        self.running: dict[tuple[int, int], asyncio.Future[wire.Reply]] = {}
        self.under_way = 0
        # Of long replies.
        self.numbers = count()
        self._served: asyncio.Future[Any] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._missing = 0
        self.address = address

    @property
    def instance(self) -> int:
        return int(self._endpoint.connection_id())

    @property
    def in_flight(self) -> int:
        """Requests that are run, and long replies that are being sent."""
        return len(self.running) + self.under_way

    def expose_metrics(self, render: Callable[[], str]) -> None:
        """Add Prometheus text to the runtime's own ``/metrics``."""
        self._endpoint.metrics.register_prometheus_expfmt_callback(render)

    async def start(self, *, check_every: float = 2.0) -> None:
        """Register and serve; every ``check_every`` seconds make sure that the instance is still listed."""
        self._served = asyncio.ensure_future(
            # With a payload to probe it with, the runtime's ``/health`` would not follow ``set_ready``.
            self._endpoint.serve_endpoint(self._generate, graceful_shutdown=True)
        )
        listing = await self._runtime.follow(self.address)
        # Not once it is listed: Kubernetes lists a pod when its ``/health`` says that it is ready.
        self._runtime.set_ready(True)
        await self._wait_listed(listing)
        send_at_once()
        await self._announce()
        self._watchdog = KEEPER.start(
            "registration", partial(self._keep_listed, listing), every=check_every, of=self.address
        )

    async def stop(self, *, timeout: float) -> None:
        """Leave discovery, then wait at most ``timeout`` seconds for what is in flight."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
            # Not before: it would register again.
            await self._withdraw()
        self._runtime.set_ready(False)
        if self._served is None:
            return
        await self._unless_down(self._endpoint.unregister_endpoint_instance, "leave discovery")
        deadline = asyncio.get_running_loop().time() + timeout
        # Callers learn of the departure a moment later; an empty set just now proves nothing.
        quiet_since: float | None = None
        while (now := asyncio.get_running_loop().time()) < deadline:
            if self.in_flight:
                quiet_since = None
            elif quiet_since is None:
                quiet_since = now
            elif now - quiet_since >= 0.5:
                break
            await asyncio.sleep(0.05)
        if self.in_flight:
            log.warning("%s: %d calls were still running after %.0f s", self.address, self.in_flight, timeout)

    async def closed(self) -> None:
        """Wait for the runtime to let go of the endpoint, after its ``shutdown``.

        It reports back to this event loop, which must still run by then.
        """
        if self._served is not None:
            await asyncio.wait({self._served}, timeout=5.0)

    async def _wait_listed(self, listing: Any) -> None:
        assert self._served is not None
        while self.instance not in listing.instance_ids():
            if self._served.done():
                self._served.result()
                raise Unavailable(f"{self.address} stopped serving before it was registered")
            await asyncio.sleep(0.02)

    async def _keep_listed(self, listing: Any) -> None:
        """Look once whether the instance is listed, and register it again when it was missing twice.

        The runtime does not renew a lease that ran out, after a freeze for example: the process would stay
        healthy and never be called again.
        """
        self._missing = 0 if self.instance in listing.instance_ids() else self._missing + 1
        if self._missing >= 2:
            log.warning(
                "%s: instance %x is gone from discovery; registering again", self.address, self.instance
            )
            try:
                await self._endpoint.register_endpoint_instance()
                await self._announce()
            except Exception as error:
                # Discovery may be down, for which no other process would be better.
                log.error("%s: cannot register again: %s", self.address, error)

    async def _unless_down(self, change: Callable[[], Awaitable[object]], what: str) -> None:
        """Wait for a change in discovery, which may be down: no reason to drop what is in flight."""
        try:
            async with asyncio.timeout(UNREGISTER_SECONDS):
                await change()
        except Exception as error:
            log.warning("%s: cannot %s: %r", self.address, what, error)

    async def _withdraw(self) -> None:
        """Undo ``_announce``."""

    async def _announce(self) -> None:
        """Register what discovery lists besides the instance; called each time the instance is registered."""

    async def _generate(self, request: object, context: Any) -> AsyncIterator[Any]:
        # The parameter names are the runtime's: it passes the context by keyword.
        if not isinstance(request, bytes):
            yield {"status": "ok"}
            return
        try:
            calls = wire.decode_calls(request)
        except TesseraError as error:
            yield wire.encode(wire.Failure.of(error))
            return
        for number in calls.cancelled:
            if unwanted := self.running.get((calls.caller, number)):
                unwanted.cancel()
        if not calls.requests:
            yield wire.encode(wire.Replies(replies={}))
            return
        joint = _Joint(calls, self)
        gone = asyncio.ensure_future(context.async_killed_or_stopped())
        gone.add_done_callback(joint.stop)
        try:
            async for payload in joint.payloads():
                yield payload
        finally:
            joint.end()
            gone.remove_done_callback(joint.stop)
            if not gone.cancel() and not gone.cancelled():
                # An error counts as leaving; asyncio complains of one that is not retrieved.
                gone.exception()

    async def answer(self, message: wire.Request) -> wire.Reply:
        """What the handler replies to a message of this process's own; errors are ``Failure``s."""
        begun = self.begin(message)
        try:
            return await begun
        except Exception:
            return self.reply(begun)

    def begin(self, message: wire.Request) -> asyncio.Future[wire.Reply]:
        """Call the handler. Where it gives a future no task is made."""
        try:
            return asyncio.ensure_future(self._handler(message))
        except Exception as error:
            failed: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed

    def reply(self, ended: asyncio.Future[wire.Reply]) -> wire.Reply:
        """Return the result of a future that was not cancelled; errors are ``Failure``s."""
        error = ended.exception()
        if error is None:
            return ended.result()
        if isinstance(error, TesseraError):
            return wire.Failure.of(error)
        if not isinstance(error, Exception):
            raise error
        log.error("%s: a call failed", self.address, exc_info=error)
        return wire.Failure.of(internal_error(error))
