"""The port on which all frontends of a service answer, open for as long as the service runs."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tessera.launch.children import FIRST_DESCRIPTOR
from tessera.listening import listen

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
        own_numbers = (*(one.fileno() for one in sockets), *memory)
        self.descriptors = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH) for number in own_numbers]
        """What a frontend inherits, as ``children.spawn`` takes it."""
        for number in memory:
            os.close(number)
        for one in sockets:
            one.close()
        self._name = os.urandom(16).hex()

    @classmethod
    def open(cls, host: str, port: int, frontends: int, *, metrics: Path, own: int = 0) -> Self:
        """Listen on every address of a host. Raises as ``listen`` does.

        ``metrics`` is a folder in which frontends keep what they count, beyond their own end. ``own`` is the
        first of the ports on which single frontends answer as well; 0: they have none.
        """
        return cls(listen(host, port), frontends, own, metrics)

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
