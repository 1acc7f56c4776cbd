"""TCP connections for fetches: every address a name resolves to is judged before any is used.

The connection goes to the very address that was judged, so a name server that answers differently the
next time changes nothing. TLS still verifies the certificate against the name, because httpcore takes
the server name from the URL.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpcore

from tessera.frontend.media.policy import MediaPolicy

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) → IP addresses as text, best first. Raises ``OSError`` when there is none."""


class AddressRefused(Exception):
    """The host, or one of its addresses, may not be connected to; the text says why."""


class SystemResolver:
    """The operating system's resolver on threads of its own.

    A look-up cannot be cancelled. On the loop's default threads, look-ups that hang would keep image
    decoding waiting; here they only keep each other waiting.
    """

    def __init__(self, threads: int = 8) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tessera-resolve")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._executor, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class VettedBackend(httpcore.AsyncNetworkBackend):
    """Resolves, judges, connects."""

    def __init__(
        self,
        policy: MediaPolicy,
        resolver: Resolver,
        connector: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._connector = connector or httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._vetted(host, port)
                failure: Exception | None = None
                for address in addresses:
                    try:
                        return await self._connector.connect_tcp(
                            address, port, None, local_address, socket_options
                        )
                    except httpcore.ConnectError as error:
                        failure = error
                raise failure or httpcore.ConnectError("the name has no address")
        except TimeoutError as error:
            raise httpcore.ConnectTimeout("no connection in time") from error

    async def _vetted(self, host: str, port: int) -> Sequence[str]:
        try:
            addresses = await self._resolver(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError("the name does not resolve") from error
        for address in addresses:
            # One refused address refuses the name: which of them a client reaches is chance.
            if (why := self._policy.address_refusal(address)) is not None:
                raise AddressRefused(f"its address is {why}")
        return addresses

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise AddressRefused("local sockets are not fetched from")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
