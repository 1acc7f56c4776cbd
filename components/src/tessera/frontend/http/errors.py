"""Which HTTP answer each error becomes.

``MEANINGS`` lists every status that the service answers with. A ``TesseraError`` has the kind of its class,
or of the nearest base class, in ``KINDS``; anything else is a 500 whose message says nothing of the inside.
The body is in OpenAI's shape unless the client's API has its own (``frontend/api``).
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import orjson
from starlette.responses import Response

from tessera import errors
from tessera.errors import TesseraError

MEANINGS: Final = {
    400: "the request is malformed or a value is out of range",
    401: "the API key is missing or not known",
    404: "there is no such route, the model is not served here or has another kind of output",
    405: "the route does not take this method",
    408: "the client took too long to send its request",
    413: "the body, a file or an image is over its limit, or the answer would be",
    415: "the bytes are not an image format that is served, or the body is compressed",
    422: "an image could not or may not be fetched, is not cached, or made its decoder fail",
    429: "the service is full or the key's rate is used up; retry after Retry-After seconds",
    431: "the request's head is over its limit",
    499: "the client went away before the answer was ready",
    500: "the service failed; the request was accepted",
    503: "no worker that can serve is there; retry after Retry-After seconds",
    504: "the request's time ran out",
}


class Kind(NamedTuple):
    """HTTP status and OpenAI's type of an error.

    ``retry_after`` is in seconds, for errors that name none themselves; None where a retry does not help.
    """

    status: int
    type: str
    retry_after: float | None = None


KINDS: Final[dict[type[TesseraError], Kind]] = {
    TesseraError: Kind(500, "server_error"),
    errors.RequestError: Kind(400, "invalid_request_error"),
    errors.PayloadTooLarge: Kind(413, "invalid_request_error"),
    errors.UnsupportedMedia: Kind(415, "invalid_request_error"),
    errors.MediaFetchError: Kind(422, "invalid_request_error"),
    errors.MediaNotCached: Kind(422, "invalid_request_error"),
    errors.DecodeFailed: Kind(422, "invalid_request_error"),
    errors.RequestTimeout: Kind(408, "timeout_error"),
    errors.ModelNotFound: Kind(404, "invalid_request_error"),
    errors.UnsupportedRoute: Kind(404, "invalid_request_error"),
    errors.ServiceError: Kind(503, "server_error", 1.0),
    errors.Overloaded: Kind(429, "rate_limit_error", 1.0),
    errors.DeadlineExceeded: Kind(504, "timeout_error"),
    errors.RequestCancelled: Kind(499, "request_cancelled"),
    errors.EngineFailed: Kind(500, "server_error"),
    errors.HandOffError: Kind(503, "server_error", 1.0),
}
"""A class that is not listed has its base class's kind."""

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
JsonObject = dict[str, Any]


class Failure(NamedTuple):
    """An HTTP answer: status, OpenAI's error object, headers (the content type among them)."""

    status: int
    error: ErrorObject
    headers: dict[str, str]

    @property
    def body(self) -> bytes:
        """The JSON body in OpenAI's shape."""
        return orjson.dumps({"error": self.error})


def release(error: BaseException) -> None:
    """Let go of what the frames that an error left still hold: bodies and images of many megabytes.

    A frame often holds the error that left it, or a task that ended with it: a cycle that only a full
    collection takes apart, and those are rare.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            left += (found.__cause__, found.__context__)


def kind_of(error: BaseException) -> Kind:
    for base in type(error).__mro__:
        if base in KINDS:
            return KINDS[base]
    return KINDS[TesseraError]


def error_object(error: BaseException) -> ErrorObject:
    """OpenAI's error object, as it stands in an error body and beside a failed row."""
    type_ = kind_of(error).type
    if isinstance(error, TesseraError):
        return _object(error.message, type_, error.param, error.code)
    return _object(_INTERNAL, type_, None, TesseraError.code)


def render(error: BaseException) -> Failure:
    """The answer for an error, with ``Retry-After`` in whole seconds of at least 1 where a retry helps."""
    kind = kind_of(error)
    seconds = kind.retry_after
    if isinstance(error, TesseraError) and error.retry_after is not None:
        seconds = error.retry_after
    return _failure(kind.status, error_object(error), seconds)


def render_status(
    status: int, message: str, *, code: str | None = None, retry_after: float | None = None
) -> Failure:
    """The answer for what no error class stands for: an unknown route, a wrong method, a missing key."""
    type_, default = _BY_STATUS.get(status, ("server_error", TesseraError.code))
    return _failure(status, _object(message, type_, None, code or default), retry_after)


def _object(message: str, type_: str, param: str | None, code: str) -> ErrorObject:
    return {"message": _plain(message), "type": type_, "param": param and _plain(param), "code": code}


def _plain(text: str) -> str:
    """Without lone surrogates, which cannot be written as JSON."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _failure(status: int, error: ErrorObject, retry_after: float | None) -> Failure:
    headers = {"content-type": "application/json"}
    if retry_after is not None:
        # Infinite or absurd waits are somebody's arithmetic gone wrong; a client would believe them.
        headers["retry-after"] = str(max(1, math.ceil(min(3600.0, retry_after))))
    return Failure(status, error, headers)


ErrorShape = Callable[[Failure], tuple[int, JsonObject]]
"""How a client's API writes a failure: the status and the body."""


def openai_error(failure: Failure) -> tuple[int, JsonObject]:
    return failure.status, {"error": failure.error}


def failure_response(failure: Failure, shape: ErrorShape = openai_error) -> Response:
    status, body = shape(failure)
    return Response(orjson.dumps(body), status_code=status, headers=failure.headers)
