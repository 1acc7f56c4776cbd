"""Fetching images over HTTP under a media policy; every address a name resolves to is judged before use.

The connection goes to the very address that was judged, so a name server that answers differently the
next time changes nothing. TLS still verifies the certificate against the name, because httpcore2 takes
the server name from the URL.

Built on httpcore2 rather than on a full client, because the things a full client does unasked are the
things to avoid here: it reads proxies from the environment, keeps cookies, sends credentials from URLs
and ``.netrc``, follows redirects and decompresses without a limit.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

# httpcore2 would import it with the first fetch of a process, and keep the event loop for 40 ms.
import anyio._backends._asyncio
import anyio.abc
import httpcore2
import httpx2
from httpcore2._backends.anyio import AnyIOStream
from opentelemetry.trace import SpanKind

from tessera import tracing
from tessera.errors import DeadlineExceeded, MediaFetchError, PayloadTooLarge
from tessera.frontend.block import Block
from tessera.frontend.media.policy import ImageLimits, MediaPolicy
from tessera.tasks import Deadline
from tessera.turns import ROUND_BYTES, ROUND_PARTS, Rounds, Threads, Turns

if TYPE_CHECKING:
    from tessera.frontend.media.loader import MediaBudget

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) → IP addresses as text, best first. Raises ``OSError`` when there is none."""


class AddressRefused(Exception):
    """The host, or one of its addresses, may not be connected to; the text says why."""


# The client that a look-up is made for: connections are opened in the task of the fetch.
_CLIENT: ContextVar[str] = ContextVar("fetching client", default="")


class SystemResolver:
    """The operating system's resolver, which reads the hosts file, search domains and whatever else the
    machine's ``nsswitch.conf`` names, on threads of its own that clients take in turns.

    A look-up cannot be cancelled. On the loop's default threads, look-ups that hang would keep other work
    waiting; here they take their own client's turns. What is a number needs no thread. ``bound_look_ups``
    bounds the time of each.
    """

    def __init__(self, threads: int = 64) -> None:
        self._threads = Threads(threads, "tessera-resolve")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        with suppress(socket.gaierror):
            return _addresses(host, port, socket.AI_NUMERICHOST)
        return await self._threads.run(partial(_addresses, host, port), _CLIENT.get())

    def close(self) -> None:
        self._threads.close()


def _addresses(host: str, port: int, flags: int = 0) -> list[str]:
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def bound_look_ups() -> None:
    """Let the system's resolver ask each name server twice, for a second; what the operator has set wins.

    By default it asks twice for five seconds, while a connection has three in all. To be called before the
    first look-up of the process, and before it has threads that read its environment.
    """
    os.environ["RES_OPTIONS"] = f"timeout:1 attempts:2 {os.environ.get('RES_OPTIONS', '')}".strip()


# What a host may send between two pieces of its body, or before the first: heads, interim answers, sizes and
# extensions of chunks, a trailer. h11 reads 10,000 interim answers in 0.2 s, and keeps the loop meanwhile. Of
# these what a round parses is read at a time, for as long as no body comes, and of one host in a round: it
# takes 3 ms for 150 interim answers, and took 40 in one turn for those of 16 hosts.
_FRAMING_BYTES: Final = 8 * ROUND_BYTES
# Of a name's addresses, those that are judged and tried: each takes 20 to 40 µs, and a zone may have 4,000.
_MOST_ADDRESSES: Final = 32
# Behind so many that answer nothing the time is over.
_PATIENT_TRIES: Final = 3


class BoundedStream(httpcore2.AsyncNetworkStream):
    """A connection on which a host may not send framing without end; it takes its turns in ``rounds``."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, rounds: Rounds) -> None:
        self._stream = stream
        self._rounds = rounds
        self._left = _FRAMING_BYTES
        self._in_body = False
        self._pieces = 0

    async def came(self) -> None:
        """Take a piece of a body as a sign that the host sends no framing alone."""
        self._left = _FRAMING_BYTES
        self._in_body = True
        self._pieces += 1
        if self._pieces % ROUND_PARTS == 0:
            await self._rounds.turn(_CLIENT.get())

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if not self._left:
            raise httpcore2.RemoteProtocolError("more framing than body")
        # Of 5 MiB in reads of 64 KiB, and not of 32, processor time is 10.6 ms and not 13.
        most = max_bytes if self._in_body else min(self._left, ROUND_BYTES)
        data = await self._stream.read(most, timeout)
        self._left = max(0, self._left - len(data))
        if not self._in_body:
            await self._rounds.turn(_CLIENT.get())
        self._in_body = False
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        # A request, behind which the next answer begins, with its head.
        self._left = _FRAMING_BYTES
        self._in_body = False
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        stream = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return BoundedStream(stream, self._rounds)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Connection(anyio.abc.ByteStream):
    """A socket of which no more is read than is asked for.

    A transport of uvloop reads 250 kB up to 32 times in a turn. Of 17 pictures of 12 MiB that came together
    it had 107 MB that nobody had asked for, and that no budget counts.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()

    async def receive(self, max_bytes: int = 1 << 16) -> bytes:
        with self._errors():
            data = await self._loop.sock_recv(self._socket, max_bytes)
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        with self._errors():
            await self._loop.sock_sendall(self._socket, item)

    async def send_eof(self) -> None:
        with self._errors():
            self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        # A read that waits ends: until then the loop keeps the socket open.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {anyio.abc.SocketAttribute.raw_socket: lambda: self._socket}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        if self._socket.fileno() < 0:
            raise anyio.ClosedResourceError
        try:
            yield
        except OSError as error:
            raise anyio.BrokenResourceError from error


class BoundedBackend(httpcore2.AnyIOBackend):
    """Connects to any address, by a ``BoundedStream``, for a ``VettedBackend``; owned by one event loop."""

    def __init__(self) -> None:
        self._rounds = Rounds()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            connection = await _connected(host, port)
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        return BoundedStream(AnyIOStream(_Connection(connection)), self._rounds)


async def _connected(address: str, port: int) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return connection


class VettedBackend(httpcore2.AsyncNetworkBackend):
    """Resolves, judges, connects."""

    def __init__(
        self,
        policy: MediaPolicy,
        resolver: Resolver,
        connector: httpcore2.AsyncNetworkBackend | None = None,
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._connector = connector or BoundedBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._vetted(host, port)
                failure: Exception | None = None
                for address in addresses:
                    try:
                        # One that answers nothing leaves the next ones their share of the time.
                        async with asyncio.timeout(timeout and timeout / min(len(addresses), _PATIENT_TRIES)):
                            return await self._connector.connect_tcp(
                                address, port, None, local_address, socket_options
                            )
                    except (httpcore2.ConnectError, TimeoutError) as error:
                        failure = error
                raise failure or httpcore2.ConnectError("the name has no address")
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout("no connection in time") from error

    async def _vetted(self, host: str, port: int) -> Sequence[str]:
        try:
            addresses = (await self._resolver(host, port))[:_MOST_ADDRESSES]
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError("the name does not resolve") from error
        for address in addresses:
            # One refused address refuses the name: which of them a client reaches is chance.
            if (why := self._policy.address_refusal(address)) is not None:
                raise AddressRefused(f"its address is {why}")
        return addresses

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        raise AddressRefused("local sockets are not fetched from")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = (
    (b"accept", b"image/*, */*;q=0.1"),
    (b"accept-encoding", b"identity"),
    (b"user-agent", b"tessera"),
)


@dataclass(frozen=True, slots=True)
class _Room:
    """Where the bytes of one fetch go. Waiting for it takes nothing of the fetch's own time, ``limit``."""

    budget: MediaBudget
    limit: asyncio.Timeout
    seconds: float

    async def wait(self, nbytes: int, param: str) -> None:
        """Wait until so many bytes more are held; raises ``Overloaded`` where that takes ``seconds``."""
        clock, end = asyncio.get_running_loop().time, self.limit.when()
        assert end is not None
        began = clock()
        self.limit.reschedule(None)
        await self.budget.bring(nbytes, self.seconds, param=param)
        self.limit.reschedule(end + clock() - began)


class Fetcher:
    """A bounded pool of fetches, which clients take in turns; owned by one event loop.

    Errors name the host and never the path, the query or what they held. ``close`` ends it.
    """

    def __init__(
        self,
        policy: MediaPolicy,
        limits: ImageLimits | None = None,
        *,
        resolver: Resolver | None = None,
    ) -> None:
        self._policy = policy
        self._max_bytes = (limits or ImageLimits()).max_bytes
        self._system = SystemResolver()
        options: dict[str, Any] = {
            "ssl_context": _authorities(),
            "max_connections": policy.max_fetches,
            "max_keepalive_connections": 16,
            "keepalive_expiry": 15.0,
        }
        self._pool: httpcore2.AsyncConnectionPool
        if policy.proxy is None:
            backend = VettedBackend(policy, resolver or self._system)
            self._pool = httpcore2.AsyncConnectionPool(network_backend=backend, **options)
        else:
            # The operator's own proxy may well have a private address.
            backend = VettedBackend(MediaPolicy(allow_private=True), resolver or self._system)
            self._pool = _proxied(policy.proxy, backend, options)
        self._turns = Turns(policy.max_fetches)

    async def get(self, url: str, *, param: str, deadline: Deadline, budget: MediaBudget) -> bytes:
        """Return the body at a URL, of which nothing is read before ``budget`` has room for it.

        Raises ``MediaFetchError`` when the URL may not be or could not be fetched within the policy's
        time-out, ``PayloadTooLarge`` for a body over an image's limit or ``budget``, ``Overloaded`` where
        there was no room for it for as long, ``DeadlineExceeded``.
        """
        target = _parse(url, param)
        before = _CLIENT.set(budget.client)
        try:
            async with asyncio.timeout(deadline.left()):
                async with self._turns.slot(budget.client):
                    return await self._bounded(target, param, budget)
        except TimeoutError:
            raise DeadlineExceeded.at(
                param, f"the request's time ran out while fetching from {target.host[:80]}"
            ) from None
        finally:
            _CLIENT.reset(before)

    async def _bounded(self, target: httpx2.URL, param: str, budget: MediaBudget) -> bytes:
        seconds = self._policy.timeout
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self._follow(target, param, _Room(budget, limit, seconds))
        except TimeoutError:
            if not limit.expired():
                raise
            raise _failed(target, param, f"took longer than {seconds:g} seconds") from None

    async def _follow(self, target: httpx2.URL, param: str, room: _Room) -> bytes:
        for _ in range(self._policy.max_redirects + 1):
            # As it is asked for: what it would be shown as depends on which of its labels can be decoded.
            host = target.raw_host.decode("ascii")
            if (why := self._policy.domain_refusal(host)) is not None:
                raise _failed(target, param, f"may not be fetched: {why}")
            if (why := self._policy.host_refusal(host)) is not None:
                raise _failed(target, param, f"may not be fetched: its address is {why}")
            # Neither path nor query, which may be secret; and the host is not told whom it works for.
            where = {"http.request.method": "GET", "url.scheme": target.scheme, "server.address": target.host}
            with tracing.span("GET", where, SpanKind.CLIENT):
                answer = await self._once(target, param, room)
            if isinstance(answer, bytes):
                return answer
            target = _redirected(target, answer, param)
        raise _failed(target, param, f"redirected more than {self._policy.max_redirects} times")

    async def _once(self, target: httpx2.URL, param: str, room: _Room) -> bytes | str:
        """Return the body of one response, or the location it redirects to."""
        url = httpcore2.URL(
            scheme=target.scheme, host=target.raw_host, port=target.port, target=target.raw_path
        )
        headers = [(b"host", target.netloc), *_HEADERS]
        timeout = {"connect": self._policy.connect_timeout}
        try:
            async with self._pool.stream(
                "GET", url, headers=headers, extensions={"timeout": timeout}
            ) as answer:
                tracing.annotate({"http.response.status_code": answer.status})
                return await self._read(answer, target, param, room)
        except AddressRefused as error:
            raise _failed(target, param, f"may not be fetched: {error}") from None
        except httpcore2.TimeoutException:
            raise _failed(target, param, "did not answer in time") from None
        except (httpcore2.NetworkError, OSError):
            raise _failed(target, param, "could not be reached, or broke the connection") from None
        except (httpcore2.ProtocolError, httpcore2.UnsupportedProtocol, ValueError):
            raise _failed(target, param, "did not answer in valid HTTP") from None

    async def _read(
        self, answer: httpcore2.Response, target: httpx2.URL, param: str, room: _Room
    ) -> bytes | str:
        headers = {name.lower(): value for name, value in answer.headers}
        if answer.status in _REDIRECTS and b"location" in headers:
            return headers[b"location"].decode("latin-1")
        if answer.status != 200:
            raise _failed(target, param, f"answered with status {answer.status}")
        if b"transfer-encoding" in headers and b"content-length" in headers:
            raise _failed(target, param, "did not answer in valid HTTP")
        # Images gain nothing from compression, and refusing it leaves no room for a bomb.
        if headers.get(b"content-encoding", b"identity").lower() not in (b"", b"identity"):
            raise _failed(target, param, "answered with a content encoding, which was not asked for")
        limit = self._max_bytes
        claimed = headers.get(b"content-length", b"")
        # What is announced is all that is read as the body.
        announced = int(claimed[:20]) if claimed.isdigit() else None
        held = announced or 0
        if held > limit:
            raise _too_large(target, param, limit)
        await room.wait(held, param)
        body = Block(announced, limit)
        stream = answer.extensions["network_stream"]
        try:
            async for chunk in answer.aiter_stream():
                await stream.came()
                came = body.nbytes + len(chunk)
                if came > limit:
                    raise _too_large(target, param, limit)
                if came > held:
                    await room.wait(came - held, param)
                    held = came
                body.add(chunk)
            if _has_bytes_behind(answer):
                # They would be taken for the next answer of that host, whoever asks for it.
                await stream.aclose()
        except BaseException:
            body.drop()
            raise
        return body.take()

    async def close(self) -> None:
        await self._pool.aclose()
        self._system.close()


def _has_bytes_behind(answer: httpcore2.Response) -> bool:
    """Whether more has come than the answer, which has been read; true where that cannot be seen."""
    connection = getattr(getattr(answer.stream, "_stream", None), "_connection", None)
    state = getattr(connection, "_h11_state", None)
    return state is None or bool(state.trailing_data[0])


@cache
def _authorities() -> ssl.SSLContext:
    """The machine's, or those that SSL_CERT_FILE or SSL_CERT_DIR names.

    Read once: a pool without a context reads them for every connection, and keeps the loop for 30 ms.
    """
    return httpcore2.default_ssl_context()


def _proxied(url: str, backend: VettedBackend, options: dict[str, Any]) -> httpcore2.AsyncConnectionPool:
    parts = urlsplit(url)
    auth = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return httpcore2.AsyncHTTPProxy(proxy_url=address, proxy_auth=auth, network_backend=backend, **options)


def _parse(url: str, param: str) -> httpx2.URL:
    try:
        target = httpx2.URL(url)
        # Two parsers have to agree on the host, or a client could show one host to a filter before this
        # service and another one to this service.
        agreed = urlsplit(url).hostname or ""
    except (httpx2.InvalidURL, ValueError, TypeError):
        raise MediaFetchError.at(param, "not a valid URL") from None
    if target.scheme not in ("http", "https") or not target.host:
        raise MediaFetchError.at(param, "expected an http or https URL with a host")
    if not 0 < (target.port or 80) < 65536:
        raise MediaFetchError.at(param, "the URL's port is out of range")
    if target.userinfo or "@" in urlsplit(url).netloc:
        raise MediaFetchError.at(param, "a URL may not carry a user name or password")
    host = target.raw_host.decode("ascii").strip("[]").lower()
    if "\\" in url or "%" in host or (agreed.isascii() and agreed != host):
        raise MediaFetchError.at(param, "the URL's host is ambiguous")
    return target


def _redirected(target: httpx2.URL, location: str, param: str) -> httpx2.URL:
    try:
        moved = str(target.join(location))
    except (httpx2.InvalidURL, ValueError):
        raise _failed(target, param, "redirected to an invalid URL") from None
    onward = _parse(moved, param)
    if target.scheme == "https" and onward.scheme == "http":
        raise _failed(target, param, "redirected from https to http")
    return onward


def _failed(target: httpx2.URL, param: str, what: str) -> MediaFetchError:
    return MediaFetchError.at(param, f"{target.host[:80]} {what}")


def _too_large(target: httpx2.URL, param: str, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge.at(param, f"{target.host[:80]} sent more than {limit} bytes")
