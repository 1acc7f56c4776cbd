"""Where etcd is, for those who reach it and for those who only ask which way that is.

The standard library alone: the launcher reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

_DEFAULT: Final = "http://localhost:2379"
_PORT: Final = 2379


def servers(environment: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return hosts and ports of ``ETCD_ENDPOINTS``, a list like ``http://10.0.0.1:2379,10.0.0.2:2379``."""
    found = []
    for endpoint in (environment.get("ETCD_ENDPOINTS") or _DEFAULT).split(","):
        url = urlsplit(endpoint.strip() if "//" in endpoint else f"//{endpoint.strip()}")
        found.append((url.hostname or "localhost", url.port or _PORT))
    return found
