"""A request's head: what it must say, and how it reads without an offer to upgrade."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

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
