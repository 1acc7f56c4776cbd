"""How many files and connections this process may hold open."""

from __future__ import annotations

import resource
from typing import Final

# For files, workers and fetches, beside the clients' connections.
_OTHERS: Final = 256


def raise_descriptor_limit() -> None:
    """Take as many descriptors as the system lets us: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """What the descriptors allow; beyond it the system would refuse our own files as well."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(soft // 2, soft - _OTHERS)
