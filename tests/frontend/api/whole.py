"""Bodies that are written in pieces, as clients get them."""

from __future__ import annotations

import msgspec

from tessera.frontend.api.formats import ResponseBody


def whole(body: ResponseBody) -> ResponseBody:
    """Return the body in one piece."""
    content = body.content
    return msgspec.structs.replace(body, content=b"".join(content)) if isinstance(content, tuple) else body
