"""What the runtime leaves unset on its sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator


def send_at_once() -> None:
    """Turn Nagle's algorithm off on every TCP socket of this process and on all that will be accepted.

    The runtime acknowledges each call with four bytes and leaves the algorithm on where it does so. The
    second of two calls in quick succession then waits for the kernel of the caller to confirm the first,
    which takes it 40 ms. Linux hands the option on from a listening socket to what it accepts.
    """
    # Twice: what was accepted while the listening sockets had their turn is listed the second time.
    for _ in range(2):
        for each in copies():
            with each:
                if each.proto == socket.IPPROTO_TCP:
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def copies() -> Iterator[socket.socket]:
    """Every socket of this process under a descriptor of its own, for the caller to close."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(descriptor))
        except OSError:
            continue  # closed meanwhile
        try:
            yield socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
