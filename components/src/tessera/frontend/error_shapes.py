"""Error bodies: OpenAI's everywhere, except on the routes whose clients expect another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson
from starlette.responses import Response

from tessera.errors import EmptyInput
from tessera.frontend.http.errors import ErrorObject, Failure

Shape = Callable[[int, ErrorObject], dict[str, Any]]

# What TEI answers with 422 is a malformed request elsewhere.
_TEI_STATUS: Final = {400: 422}
_TEI_TYPES: Final = {
    401: "Unauthorized",
    413: "Validation",
    429: "Overloaded",
    503: "Unhealthy",
    504: "Overloaded",
}


def openai_error(status: int, error: ErrorObject) -> dict[str, Any]:
    return {"error": error}


def cohere_error(status: int, error: ErrorObject) -> dict[str, Any]:
    return {"message": error["message"]}


def voyage_error(status: int, error: ErrorObject) -> dict[str, Any]:
    return {"detail": error["message"]}


def tei_error(status: int, error: ErrorObject) -> dict[str, Any]:
    default = "Validation" if status < 500 else "Backend"
    if error["code"] == EmptyInput.code:
        default = "Empty"
    return {"error": error["message"], "error_type": _TEI_TYPES.get(status, default)}


SHAPES: Final[dict[str, Shape]] = {
    "/v2/embed": cohere_error,
    "/v1/multimodalembeddings": voyage_error,
    "/embed": tei_error,
}


def failure_response(failure: Failure, path: str) -> Response:
    shape = SHAPES.get(path, openai_error)
    status = failure.status
    if shape is tei_error and failure.error["code"] != EmptyInput.code:
        status = _TEI_STATUS.get(status, status)
    return Response(
        orjson.dumps(shape(status, failure.error)),
        status_code=status,
        headers=failure.headers,
    )
