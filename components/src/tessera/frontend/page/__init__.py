"""The try-it page at ``/``: one HTML file with its style and scripts inside, and a few example pictures."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tessera.frontend.api.routes import ApiRoute
from tessera.imaging import media_types

SCRIPTS: Final = ("elements.js", "service.js", "command.js", "pictures.js", "status.js", "main.js")
"""In the order in which they are put together: they share one scope."""

_FOLDER: Final = files(__name__)
_TYPES: Final = {"jpg": "image/jpeg", "png": "image/png", "webp": "image/webp", "json": "application/json"}


class Page:
    """Everything the page consists of, read once. Knows nothing of the service it is shown for.

    The policy allows this style and this script by their digests and connections to where the page came
    from; so even text that found its way into the page as HTML could neither run nor load anything.
    """

    def __init__(self) -> None:
        style = (_FOLDER / "page.css").read_text("utf-8")
        script = "\n".join((_FOLDER / name).read_text("utf-8") for name in SCRIPTS)
        html = (_FOLDER / "page.html").read_text("utf-8")
        for mark, text in (
            ("/* style */", style),
            ("/* script */", script),
            ("/* media types */", ",".join(media_types())),
        ):
            html = html.replace(mark, text)
        self.html = html.encode()
        self.etag = f'"{hashlib.sha256(self.html).hexdigest()[:32]}"'
        self.policy = "; ".join(
            (
                "default-src 'none'",
                f"script-src '{_digest(style_or_script=script)}'",
                f"style-src '{_digest(style_or_script=style)}'",
                # All pictures are blobs, the examples as well; the icon is a data URL.
                "img-src blob: data:",
                "connect-src 'self'",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
                "require-trusted-types-for 'script'",
                "trusted-types 'none'",
            )
        )
        self.examples = {
            entry.name: (_TYPES[entry.name.rpartition(".")[2]], entry.read_bytes())
            for entry in (_FOLDER / "examples").iterdir()
            if entry.name.rpartition(".")[2] in _TYPES
        }

    @property
    def paths(self) -> frozenset[str]:
        """Every path the page is made of; none of them says anything about the service."""
        return frozenset(("/", *(f"/examples/{name}" for name in self.examples)))


def _digest(*, style_or_script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(style_or_script.encode()).digest()).decode()


_HEADERS: Final = {
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes(page: Page) -> list[ApiRoute]:
    """Return the routes of a page; they are for browsers, so not in the API's description."""

    async def show(request: Request) -> Response:
        headers = _HEADERS | {"content-security-policy": page.policy, "etag": page.etag}
        if page.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(page.html, media_type="text/html; charset=utf-8", headers=headers)

    async def example(request: Request) -> Response:
        found = page.examples.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        media_type, data = found
        return Response(data, media_type=media_type, headers=_HEADERS | {"cache-control": "max-age=3600"})

    methods = ("GET", "HEAD")
    return [ApiRoute("/", show, methods=methods), ApiRoute("/examples/{name}", example, methods=methods)]
