"""Opens listening sockets. The standard library alone: the launcher runs before anything is installed."""

from __future__ import annotations

import errno
import socket
from typing import Final

# As uvicorn has it; the system may allow fewer (net.core.somaxconn).
_BACKLOG: Final = 2048

NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that this host does not have: of ``localhost``, say, one of IPv6."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a socket for every address of a name that this host has.

    Raises ``OSError``, ``OverflowError`` or ``UnicodeError`` where there is none or one is taken.
    """
    made: list[socket.socket] = []
    lacking: OSError | None = None
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                made.append(socket.create_server(address, family=family, backlog=_BACKLOG))
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                lacking = error
        if lacking is not None and not made:
            raise lacking
    except OSError:
        for one in made:
            one.close()
        raise
    return made
