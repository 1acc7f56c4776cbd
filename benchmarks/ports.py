"""Ports for services that are started only to be measured or tested."""

from __future__ import annotations

import random
import socket


def free_ports(count: int) -> list[int]:
    """Consecutive ports that nobody listens on now, below 32768: the runtime reads its own as int16."""
    while True:
        first = random.randrange(20_000, 32_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return list(range(first, first + count))
