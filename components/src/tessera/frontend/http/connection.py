"""HTTP connections with limits of time and size, and with heads that can be read in one way only.

uvicorn's own protocol sets no time and no size for a request's head. It waits without end for a client that
does not read its answer, or that sends a body behind it. It takes the body behind an offer to upgrade for the
next request, and closes an idle connection without looking whether a request has come. Bodies have a time
and a limit of their own (``api/endpoint.py``).
"""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, NamedTuple, NoReturn, cast

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tessera.errors import RequestError
from tessera.frontend.exchange import request_id_of
from tessera.frontend.http.access_log import write_refused_head
from tessera.frontend.http.auth import Authenticator
from tessera.frontend.http.errors import Failure, render_status
from tessera.frontend.http.tls import PROGRESS_BYTES
from tessera.settings import KIB, POSITIVE, Setting
from tessera.tasks import Departure
from tessera.turns import ROUND_BYTES, ROUND_PARTS, Rounds

# RFC 3986's host and port; none at all is allowed as well.
_HOST: Final = re.compile(rb"[\w.~%!$&'()*+,;=:\[\]-]*", re.ASCII)

Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case, in the order of the head."""


def host_problem(headers: Headers, version: str) -> str | None:
    """What is wrong with the host that is asked; ``version`` as in ``"1.1"``.

    RFC 9112 3.2: a proxy on the way could take another one of two for the one that is meant.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version not in ("0.9", "1.0")):
        found = f"{len(hosts)} Host headers" if hosts else "no Host header"
        return f"the request has {found}, expected one"
    if hosts and not _HOST.fullmatch(hosts[0].strip()):
        return "the Host header is not a host and a port"
    return None


def without_offer(method: bytes, target: bytes, version: str, headers: Headers) -> bytes:
    """The head without its ``Upgrade``, as the parser read it: each value is one line, and what frames the
    body keeps its order."""
    lines = [b"%s %s HTTP/%s" % (method, target, version.encode())]
    lines += [b"%s: %s" % (name, value) for name, value in headers if name != b"upgrade"]
    return b"\r\n".join((*lines, b"", b""))


class SlowReader:
    """Aborts a connection whose client has read less than 16 KiB in ``seconds``."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, *, seconds: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """From now on, while something waits for the client."""
        self.stop()
        self._timer = self._loop.call_later(
            self._seconds, self._look, self._transport.get_write_buffer_size()
        )

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, before: int) -> None:
        if self._transport.get_write_buffer_size() > before - PROGRESS_BYTES:
            self._transport.abort()
        else:
            self.watch()


# What a client is given to read the last answer.
_LINGER_SECONDS: Final = 1.0


class LingeringTransport(asyncio.Transport):
    """A transport with a lingering close: the last answer reaches a client that is still sending.

    Closing at once would reset the connection, and the answer would be lost. The protocol must discard what
    still arrives.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        if self._transport.is_closing():
            return
        # TLS knows no end of one side alone: the answer says that it is the last.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._loop.call_later(_LINGER_SECONDS, self._transport.close)


class AnswerTransport(asyncio.Transport):
    """Writes the head of one answer together with the first of its body.

    uvicorn writes them one after the other, and uvloop passes each to the system at once: 5 to 15 µs. Drops
    what is written once the connection is closing: uvicorn marks the last request of a connection alone as
    one whose client has gone, and the one that runs writes on.
    """

    _head = b""
    _begun = False

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._transport.is_closing():
            return
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif self._begun or data == STATUS_LINE[100] + b"\r\n":
            self._transport.write(data)
        else:
            self._begun, self._head = True, bytes(data)

    def flush(self) -> None:
        """Write a head that nothing follows."""
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.flush()
        self._transport.close()


# Descriptors for files, workers and fetches, beside the clients' connections.
_OTHER_DESCRIPTORS: Final = 256


def raise_descriptor_limit() -> None:
    """Take as many descriptors as the system lets us: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """What the descriptors allow; beyond it the system would refuse our own files as well."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(soft // 2, soft - _OTHER_DESCRIPTORS)


# Before an idle connection is closed: the loop has read by then what had come while it was busy. Closing a
# connection on which something lies unread resets it under its client.
_LAST_LOOK_SECONDS: Final = 0.05
# A client that has sent so much of what is not read, in however many pieces, waits for its turn: one in so
# many seconds, and keys take turns. Of each the loop reads 256 KiB, in 0.25 ms with all that is around it.
_SKIPPED_BYTES: Final = 16 * ROUND_BYTES
SKIPPING_SECONDS: Final = 0.002
# What a field of a head counts beside its name and its value, as in HTTP/2 (RFC 9113 6.5.2): 13,000 fields of
# five bytes took the loop 30 ms, and need no key.
_FIELD_BYTES: Final = 32
# Connections beyond the limit that may wait until their clients have read why.
REFUSED_AT_ONCE: Final = 64


# Requests that need no turn in a round: 600 that came together took the loop 70 to 210 ms until the last had
# begun.
_AT_ONCE: Final = 32


class Arrivals(Rounds):
    """Gives all connections their turns; the first 32 requests of a round need none."""

    _came = 0

    def passes(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether a request needs no turn, and count it."""
        if not self._came:
            # Behind all that comes in this round.
            loop.call_soon(setattr, self, "_came", 0)
        self._came += 1
        return self._came <= _AT_ONCE


class HeldFlow(FlowControl):
    """Reads nothing more while it is ``held``, whoever would go on."""

    held = False

    def hold(self) -> None:
        self.held = True
        self.pause_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``header_seconds`` for a request's head from its first byte (or from the connection's beginning),
    ``header_bytes`` of it, in which each field counts 32 more; ``keep_alive_seconds`` from an answer to the
    next request; a client has ``write_seconds`` to read some of what waits for it."""

    header_seconds: Annotated[
        float,
        Setting(
            flag="--header-timeout-seconds", check=POSITIVE, help="time for the head of a request, then 408"
        ),
    ] = 10.0
    header_bytes: Annotated[
        int, Setting(flag="--max-header-kb", unit=KIB, check=POSITIVE, help="largest head of a request")
    ] = 64 << 10
    # Longer than clients keep their connections (httpx 5 s, aiohttp 15 s, balancers often 60 s): whoever
    # closes first never has a request on the way to a connection that is being closed.
    keep_alive_seconds: Annotated[
        float,
        Setting(
            flag="--keep-alive-seconds",
            check=POSITIVE,
            help="time that an idle connection stays open; longer than balancers and clients keep theirs",
        ),
    ] = 75.0
    write_seconds: float = 30.0


class Answer(NamedTuple):
    """A whole answer: its status, its headers but those that every answer has, its body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Whatever is wrong with a request's head is answered in OpenAI's shape, then closed."""

    flow: HeldFlow
    _reader: SlowReader

    def __init__(
        self,
        *args: Any,
        limits: ConnectionLimits,
        changed: Callable[[], None] = lambda: None,
        refuse: Callable[[Scope], Answer | None] = lambda scope: None,
        keys: Authenticator | None = None,
        rounds: Arrivals,
        skips: Rounds,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        # Those in which all connections have their turns: to parse, and to drop what nobody reads.
        self._rounds = rounds
        self._skips = skips
        self._skipped_bytes = 0
        # What came and waits to be parsed.
        self._unparsed = b""
        # Whether the connection waits for its round, one at a time: to parse, or to begin the next request.
        self._waits = False
        # The last request that began.
        self._begun: RequestResponseCycle | None = None
        # Whose turns they are, and the head that says so.
        self._keys = keys
        self._name = ""
        self._named_by: object = None
        # Of what is being parsed: its parts, and the bytes of a body that its request takes.
        self._parts = self._body_bytes = 0
        # Called when there is a connection more or less.
        self._changed = changed
        # Answers a request by its head, where it can without the application.
        self._refuse_request = refuse
        self.timeout_keep_alive = limits.keep_alive_seconds  # type: ignore[assignment]
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: Failure | None = None
        # Nothing more is read.
        self._refused = False
        # Why, where an earlier request is still to be answered.
        self._held: Failure | None = None
        self._in_body = False
        # Of the body that is being read: what came of it; its length once that was asked for, -1 for none.
        self._read_bytes = self._length = 0
        self._leaving = False
        # What came since some of a body did: chunks' sizes and extensions, or a trailer.
        self._coding_bytes = 0
        self._damaged: tuple[RequestResponseCycle, RequestError] | None = None
        # The last request's.
        self._departure: Departure | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = HeldFlow(transport)
        self._changed()
        self._reader = SlowReader(transport, self.loop, seconds=self._limits.write_seconds)
        excess = len(self.connections) - max_connections()
        if excess > REFUSED_AT_ONCE:
            # An answer would hold a descriptor for another second.
            transport.abort()
            return
        if excess > 0:
            self._refuse(render_status(503, "too many connections", code="overloaded", retry_after=1.0))
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._reader.stop()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._changed()
        if self._departure is not None:
            self._departure.leave()

    def data_received(self, data: bytes) -> None:
        """Parse for as long as others need not wait; the rest waits for its round, or for answers."""
        if len(data) > ROUND_BYTES or self.flow.held or self._refused or self.pipeline or self._skipped_bytes:
            self._parse_in_rounds(data)
            return
        # Most requests, whole.
        self._parts = 0
        self._parse(data)
        if self._parts > ROUND_PARTS:
            self.flow.hold()
            self._parse_on_later()

    def _parse_in_rounds(self, data: bytes) -> None:
        data, self._unparsed = self._unparsed + data, b""
        self.flow.held = False
        if self._refused:
            self._skipped_bytes += len(data)
        at = self._parts = self._body_bytes = 0
        while at < len(data) and not (self._parts > ROUND_PARTS or self.pipeline or self._refused):
            self._parts = 0
            end = at + max(ROUND_BYTES, self._announced_bytes() if self._in_body else 0)
            self._parse(data[at:end])
            at = end
        if self._skipped_bytes >= _SKIPPED_BYTES:
            self._skip()
        # The loop would read 8 MB of extensions at once.
        more = at < len(data) or self._parts > ROUND_PARTS or len(data) - self._body_bytes > _SKIPPED_BYTES
        if more and not self._refused:
            self._unparsed = data[at:]
            self.flow.hold()
            self._parse_on_later()

    def _parse_on_later(self) -> None:
        # Else once the requests are answered that came before.
        if not self.pipeline:
            self._go_on_later()

    def _go_on_later(self) -> None:
        if not self._waits:
            self._waits = True
            self._rounds.wait(self.loop, self._go_on, self._client())

    def _client(self) -> str:
        """Return whose turns those of the connection are: those of a key, or of an address without one."""
        asking = self.pipeline[-1][0].scope["headers"] if self.pipeline else self.headers or ()
        headers = cast(Sequence[tuple[bytes, bytes]], asking)
        if self._in_head or headers is not self._named_by:
            key = None if self._keys is None else self._keys.name_of(dict(reversed(headers)))
            self._name = f"key {key}" if key is not None else str((self.client or ("",))[0])
            self._named_by = headers
        return self._name

    def _go_on(self) -> None:
        self._waits = False
        if self.transport.is_closing():
            return
        if self.pipeline:
            # Else once the one that runs is answered.
            if self._begun is None or self._begun.response_complete:
                self.flow.resume_reading()
                self._start_asgi_task(*self.pipeline.pop(), turn=True)
                if self.flow.held:
                    # The rest of its body may be what waits.
                    self._parse_on_later()
        elif self.flow.held:
            self.data_received(b"")
            self._skip_more()

    def _announced_bytes(self) -> int:
        """Return what is to come of a body of known length, which is one part however much of it comes."""
        if not self._length:
            self._length = int(dict(self.headers).get(b"content-length", b"-1"))
        return self._length - self._read_bytes

    def _parse(self, data: bytes) -> None:
        before = self._in_head
        self._coding_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._feed_behind_offer(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse_parsing(error)
            return
        if self._in_body and self._coding_bytes > self._limits.header_bytes:
            self._break_off(self._long_trailer)
        if self._in_head and self._head_timer is None and not self._refused:
            # Most heads come whole, and need no clock.
            self._arm()
        if before and self._in_head:
            # No callback came that could have counted it: the parser keeps a line until it is whole.
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.header_bytes:
                self._refuse(self._too_large())

    def _refuse_parsing(self, error: httptools.HttpParserError) -> None:
        """Answer what the parser, or a callback of it, refused."""
        if not self._in_body:
            self._refuse(self._refusal or render_status(400, "this is not a valid HTTP request"))
        elif self._refusal is None:
            self._break_off(f"the body's transfer coding is damaged: {error}")
        else:
            self._break_off(self._long_trailer)

    def _feed_behind_offer(self, rest: memoryview) -> None:
        """Ignore an offer to upgrade, and parse on: no other protocol is spoken here (RFC 9110 7.8)."""
        while True:
            self._ignore_offer()
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]

    def _ignore_offer(self) -> None:
        """Parse a head again, without its offer to upgrade.

        The parser ends a message at the head that offers one, whatever body was announced: it is then
        given the same head without the offer, and what came behind it.
        """
        version = self.parser.get_http_version()
        head = without_offer(self.parser.get_method(), self.url, version, self.headers)
        # The old one may stand at the end of what it takes for its last message.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(head)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # Not with any data: what arrives of a body that is answered already is no sign of another request.
        self._unset_keepalive_if_required()
        self._in_head = True
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _FIELD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            self._refuse_connect()
        if self.parser.should_upgrade():
            # It comes again without its offer.
            return
        version = self.parser.get_http_version()
        if version != "1.1":
            # A client of 1.0 would take it for the answer (RFC 9110 10.1.1).
            self.expect_100_continue = False
        if (problem := host_problem(self.headers, version)) is not None:
            self._refusal = render_status(400, problem)
            raise ValueError(problem)
        self._disarm()
        super().on_headers_complete()
        if self._leaving:
            self.cycle.keep_alive = False
        self._in_head = False
        self._in_body = True
        self._head_bytes = self._coding_bytes = self._read_bytes = self._length = 0

    def _refuse_connect(self) -> NoReturn:
        self._refusal = render_status(405, "CONNECT is not served here: this is not a proxy")
        self._refusal.headers["allow"] = "GET, HEAD, POST"
        raise ValueError("CONNECT")

    def on_body(self, body: bytes) -> None:
        self._parts += 1
        self._body_bytes += len(body)
        self._read_bytes += len(body)
        self._coding_bytes = 0
        super().on_body(body)
        if self.cycle.response_complete:
            self._skipped_bytes += len(body)

    def _skip(self) -> None:
        """Leave the others their time, where somebody goes on to send what nobody reads.

        The loop would read 8 MB of it at once, and from 30 connections that takes 0.5 s.
        """
        self._skipped_bytes = 0
        if not self.flow.read_paused:
            self.flow.pause_reading()
            self._skips.wait(self.loop, self._skip_more, self._client())

    def _skip_more(self) -> None:
        if not self.transport.is_closing() and not self.pipeline:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._in_body = False
            self.cycle.scope["state"]["whole"] = True
            super().on_message_complete()

    def shutdown(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            return
        self._leaving = True
        if not self._refused and not self._head_bytes:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_handler()

    def timeout_keep_alive_handler(self) -> None:
        if self.flow.write_paused and not self._leaving:
            # The client still reads the last answer, and has its time for the next request after that.
            self._await_next_request()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(_LAST_LOOK_SECONDS, self.transport.close)

    def _await_next_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def on_response_complete(self) -> None:
        if not self.pipeline:
            # It would begin the next one now: one of each connection in every round of the loop.
            super().on_response_complete()
        if self.pipeline or self.flow.held:
            self._go_on_later()
        if self._head_timer is not None:
            # The next request has begun, and that is its clock.
            self._unset_keepalive_if_required()
        if self._held is not None and self.cycle.response_complete and not self.transport.is_closing():
            self._send(self._held)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.watch()

    def resume_writing(self) -> None:
        self._reader.stop()
        super().resume_writing()
        # uvicorn's clock began when the answer was written, not when it was read.
        if self.timeout_keep_alive_task is not None and not self._leaving:
            self._await_next_request()

    def _count(self, nbytes: int) -> None:
        self._parts += 1
        self._head_bytes += nbytes
        if self._head_bytes > self._limits.header_bytes:
            self._refusal = self._too_large()
            raise ValueError("the head is too large")

    def _too_large(self) -> Failure:
        limit = self._limits.header_bytes
        return render_status(431, f"the request's head is larger than {limit} bytes", code="header_too_large")

    @property
    def _long_trailer(self) -> str:
        return f"the body's trailer, or a chunk's extension, is larger than {self._limits.header_bytes} bytes"

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.header_seconds, self._late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            # The next request on a connection whose last one is still being answered.
            self._arm()
            return
        seconds = self._limits.header_seconds
        self._refuse(render_status(408, f"the request's head did not arrive within {seconds:g} s"))

    def _refuse(self, failure: Failure) -> None:
        """Answer a request's head and close; requests before it are answered first."""
        self._disarm()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is None or self.cycle.response_complete:
            self._send(failure)
        else:
            self._held = failure

    def _break_off(self, why: str) -> None:
        """Where the body that is being read would end, and another request begin, cannot be known."""
        self._refused = True
        cycle = self.cycle
        if cycle.response_complete:
            # It was answered without its body.
            self._linger()
        elif cycle.response_started:
            self.transport.abort()
        else:
            self._damaged = cycle, RequestError(why)
            cycle.keep_alive = False
            cycle.transport = LingeringTransport(self.transport, self.loop)
            cycle.message_event.set()

    def _start_asgi_task(
        self, cycle: RequestResponseCycle, app: ASGI3Application, turn: bool = False
    ) -> None:
        """With a ``receive`` that raises for a damaged body: the route answers it in its own shape.

        The state's ``departure`` tells of a client that goes away, without a task that waits for it, and
        ``whole`` is there once the body is. Where many came together it begins in its ``turn``.
        """
        if not turn and not self._rounds.passes(self.loop):
            return self._wait_behind_others(cycle, app)
        self._begun = cycle
        if self._answered_at_once(cycle):
            return
        cycle.scope["state"]["departure"] = self._departure = Departure()
        cycle.transport = answer = AnswerTransport(cycle.transport)

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            async def whole() -> Message:
                message = await receive()
                if not message.get("more_body"):
                    # Reading stops at a large body, and the end of the connection would not be heard.
                    self.flow.resume_reading()
                if self._damaged and self._damaged[0] is cycle and not cycle.response_started:
                    raise self._damaged[1]
                return message

            async def read(message: Message) -> None:
                await send(message)
                if self.flow.write_paused:
                    # Until then the answer takes memory, and counts for its client.
                    await self.flow.drain()

            await cast(ASGIApp, app)(scope, whole, read)
            # Of an answer without a body.
            answer.flush()

        super()._start_asgi_task(cycle, cast(ASGI3Application, guarded))

    def _wait_behind_others(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.pipeline.append((cycle, app))
        self._go_on_later()

    def _answered_at_once(self, cycle: RequestResponseCycle) -> bool:
        """Whether the request was refused here: its body is skipped as it comes, and the connection goes on.

        Whatever is unusual about the connection is left to the application's way: requests behind each other,
        a client that reads slowly or waits for its 100, one whose connection ends.
        """
        if (
            self.pipeline
            or self._leaving
            or self._head_timer is not None
            or self.flow.write_paused
            or not cycle.keep_alive
            or self.transport.is_closing()
            or cycle.waiting_for_100_continue
            or (answer := self._refuse_request(cast(Scope, cycle.scope))) is None
        ):
            return False
        self._write_at_once(cycle, answer)
        return True

    def _write_at_once(self, cycle: RequestResponseCycle, answer: Answer) -> None:
        lines = [STATUS_LINE[answer.status]]
        for name, value in (*cycle.default_headers, *answer.headers):
            lines += (name, b": ", value, b"\r\n")
        lines += (b"\r\n", answer.body)
        self.transport.write(b"".join(lines))
        cycle.response_started = cycle.response_complete = True
        # It refers to this object.
        cycle.on_response = lambda: None
        self.on_response_complete()

    def _send(self, failure: Failure) -> None:
        request_id = request_id_of({})
        if self._head_bytes or failure.status != 408:
            # A connection on which nothing came was no request.
            write_refused_head(request_id, failure)
        body = failure.body
        lines = [
            STATUS_LINE[failure.status],
            *(f"{name}: {value}\r\n".encode("latin-1") for name, value in failure.headers.items()),
            f"content-length: {len(body)}\r\n".encode(),
            f"x-request-id: {request_id}\r\n".encode(),
            b"connection: close\r\n\r\n",
            body,
        ]
        self.transport.write(b"".join(lines))
        self._linger()

    def _linger(self) -> None:
        # An earlier request's clock could end before that.
        self._unset_keepalive_if_required()
        LingeringTransport(self.transport, self.loop).close()
