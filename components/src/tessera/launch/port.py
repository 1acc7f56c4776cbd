"""The port on which all frontends of a service answer, open for as long as the service runs."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tessera.launch.children import FIRST_DESCRIPTOR

# As uvicorn has it; the system may allow fewer (net.core.somaxconn).
_BACKLOG: Final = 2048
# Above the numbers that children know them by.
_HIGH: Final = 64


class Port:
    """Listening sockets, and the memory that frontends share; each frontend inherits both.

    Connections that wait in the queue outlive a frontend that ends, as one's own socket would not let them.
    The memory has no name, so that nothing can be left of it.
    """

    def __init__(self, sockets: list[socket.socket], frontends: int, own: int, metrics: Path) -> None:
        self._frontends = frontends
        self._metrics = str(metrics)
        self._own = own
        memory = [os.memfd_create(f"tessera-frontends-{name}") for name in ("table", "cache")]
        self.descriptors = [_high(number) for number in (*(one.fileno() for one in sockets), *memory)]
        """What a frontend inherits, as ``children.spawn`` takes it."""
        for number in memory:
            os.close(number)
        for one in sockets:
            one.close()
        self._name = os.urandom(16).hex()

    @classmethod
    def open(cls, host: str, port: int, frontends: int, *, metrics: Path, own: int = 0) -> Self:
        """Listen on every address of a host. Raises ``OSError``.

        ``metrics`` is a folder in which frontends keep what they count, beyond their own end. ``own`` is the
        first of the ports on which single frontends answer as well; 0: they have none.
        """
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets: list[socket.socket] = []
        refused: OSError | None = None
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sockets.append(_listening(socket.socket(family, kind, protocol), address))
            except OSError as error:
                # A name may have addresses that this machine has not.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                refused = error
        if not sockets and refused is not None:
            raise refused
        return cls(sockets, frontends, own, metrics)

    def seat(self, index: int, numbers: Sequence[int] = ()) -> dict[str, str]:
        """The place of a frontend, as a variable of its environment.

        ``numbers`` are those of the descriptors there; without them as ``children.spawn`` gives them.
        """
        # The launcher has nothing but its own modules until the environment is made.
        from tessera.frontend.group import GROUP_VARIABLE, Seat

        *sockets, table, cache = numbers or range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + len(self.descriptors))
        seat = Seat(
            name=self._name,
            index=index,
            size=self._frontends,
            sockets=tuple(sockets),
            table=table,
            cache=cache,
            metrics=self._metrics,
            port=self._own and self._own + index,
        )
        return {GROUP_VARIABLE: seat.write()}

    def close(self) -> None:
        """Before the frontends are told to end: the last of them then refuses what waits, at once."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


def _listening(made: socket.socket, address: tuple[object, ...]) -> socket.socket:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _high(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
