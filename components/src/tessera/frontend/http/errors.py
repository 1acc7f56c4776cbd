"""Which HTTP answer each error becomes; the one place where errors meet status codes and clients' shapes.

``MEANINGS`` lists every status the service answers with. A ``TesseraError`` finds its row by its class or
the nearest base class in ``ROWS``; anything else is a 500 whose message says nothing of the inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import orjson
from starlette.responses import Response

from tessera import errors
from tessera.errors import EmptyInput, TesseraError

MEANINGS: Final = {
    400: "the request is malformed or a value is out of range",
    401: "the API key is missing or not known",
    404: "there is no such route, or the model is not served here",
    405: "the route does not take this method",
    408: "the client took too long to send its request",
    413: "the body, a file or an image is over its limit",
    415: "the bytes are not an image format that is served, or the body is compressed",
    422: "an image could not or may not be fetched, is not cached, or made its decoder fail",
    429: "the service is full or the key's rate is used up; retry after Retry-After seconds",
    431: "the request's head is over its limit",
    499: "the client went away before the answer was ready",
    500: "the service failed; the request was accepted",
    503: "no worker that can serve is there; retry after Retry-After seconds",
    504: "the request's time ran out",
}


class Row(NamedTuple):
    status: int
    type: str
    retry_after: float | None = None


ROWS: Final[dict[type[TesseraError], Row]] = {
    TesseraError: Row(500, "server_error"),
    errors.RequestError: Row(400, "invalid_request_error"),
    errors.PayloadTooLarge: Row(413, "invalid_request_error"),
    errors.UnsupportedMedia: Row(415, "invalid_request_error"),
    errors.MediaFetchError: Row(422, "invalid_request_error"),
    errors.MediaNotCached: Row(422, "invalid_request_error"),
    errors.DecodeFailed: Row(422, "invalid_request_error"),
    errors.RequestTimeout: Row(408, "timeout_error"),
    errors.ModelNotFound: Row(404, "invalid_request_error"),
    errors.ServiceError: Row(503, "server_error", 1.0),
    errors.Overloaded: Row(429, "rate_limit_error", 1.0),
    errors.DeadlineExceeded: Row(504, "timeout_error"),
    errors.RequestCancelled: Row(499, "request_cancelled"),
    errors.EngineFailed: Row(500, "server_error"),
    errors.HandOffError: Row(503, "server_error", 1.0),
}
"""A class that is not listed takes its base class's row. The last value is the ``Retry-After`` to send
when the error itself names none."""

_BY_STATUS: Final = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "request_timeout"),
    413: ("invalid_request_error", "payload_too_large"),
    415: ("invalid_request_error", "unsupported_media"),
    422: ("invalid_request_error", "unprocessable"),
    429: ("rate_limit_error", "rate_limited"),
    431: ("invalid_request_error", "header_too_large"),
}
_INTERNAL: Final = "the service failed unexpectedly"

ErrorObject = dict[str, str | None]


class Failure(NamedTuple):
    """An HTTP answer: status, OpenAI's error object, headers (the content type among them)."""

    status: int
    error: ErrorObject
    headers: dict[str, str]

    @property
    def body(self) -> bytes:
        """The JSON body in OpenAI's shape."""
        return orjson.dumps({"error": self.error})


def row_of(error: BaseException) -> Row:
    for base in type(error).__mro__:
        if base in ROWS:
            return ROWS[base]
    return ROWS[TesseraError]


def error_object(error: BaseException) -> ErrorObject:
    """OpenAI's error object, as it stands in an error body and beside a failed row."""
    kind = row_of(error).type
    if isinstance(error, TesseraError):
        return _object(error.message, kind, error.param, error.code)
    return _object(_INTERNAL, kind, None, TesseraError.code)


def render(error: BaseException) -> Failure:
    """The answer for an error, with ``Retry-After`` in whole seconds of at least 1 where a retry helps."""
    row = row_of(error)
    seconds = row.retry_after
    if isinstance(error, TesseraError) and error.retry_after is not None:
        seconds = error.retry_after
    return _failure(row.status, error_object(error), seconds)


def render_status(
    status: int, message: str, *, code: str | None = None, retry_after: float | None = None
) -> Failure:
    """The answer for what no error class stands for: an unknown route, a wrong method, a missing key."""
    kind, default = _BY_STATUS.get(status, ("server_error", TesseraError.code))
    return _failure(status, _object(message, kind, None, code or default), retry_after)


def _object(message: str, kind: str, param: str | None, code: str) -> ErrorObject:
    return {"message": _plain(message), "type": kind, "param": param and _plain(param), "code": code}


def _plain(text: str) -> str:
    """Without lone surrogates, which cannot be written as JSON."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _failure(status: int, error: ErrorObject, retry_after: float | None) -> Failure:
    headers = {"content-type": "application/json"}
    if retry_after is not None:
        # Infinite or absurd waits are somebody's arithmetic gone wrong; a client would believe them.
        headers["retry-after"] = str(max(1, math.ceil(min(3600.0, retry_after))))
    return Failure(status, error, headers)


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
