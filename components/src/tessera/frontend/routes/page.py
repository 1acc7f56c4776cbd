"""``GET /``: the page to try the service on, and its example pictures."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tessera.frontend.page import Page

_HEADERS: Final = {
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes(page: Page) -> APIRouter:
    # For browsers, so not in the API's description.
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def show(request: Request) -> Response:
        headers = _HEADERS | {"content-security-policy": page.policy, "etag": page.etag}
        if page.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(page.html, media_type="text/html; charset=utf-8", headers=headers)

    @router.api_route("/examples/{name}", methods=["GET", "HEAD"])
    async def example(name: str) -> Response:
        found = page.examples.get(name)
        if found is None:
            raise HTTPException(404)
        media_type, data = found
        return Response(data, media_type=media_type, headers=_HEADERS | {"cache-control": "max-age=3600"})

    return router
