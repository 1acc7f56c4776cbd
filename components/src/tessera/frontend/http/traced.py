"""HTTP requests in traces."""

from __future__ import annotations

from collections import defaultdict

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera import tracing


class Traced:
    """ASGI middleware: a span for each POST request, in the trace that the client names if it names one.

    Probes and scrapes are not work and leave none. FastAPI can do the like itself, but puts the query into
    the span, where clients of other services may have put a key, and knows no request ids.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        status, request_id = 500, ""
        attributes = {
            "http.request.method": "POST",
            "url.path": scope["path"][:256],
            "url.scheme": scope["scheme"],
            "network.protocol.version": scope["http_version"],
        }
        with tracing.serve("POST", _headers(scope), attributes) as span:

            async def sending(message: Message) -> None:
                nonlocal status, request_id
                if message["type"] == "http.response.start":
                    status, headers = message["status"], MutableHeaders(scope=message)
                    request_id = headers.get("x-request-id", "")
                    # For clients that named no trace and want to find theirs.
                    headers["traceresponse"] = span.traceparent
                await send(message)

            try:
                await self._app(scope, receive, sending)
            finally:
                span.set({"http.response.status_code": status, "tessera.request_id": request_id})
                _conclude(scope, span, status)


def _conclude(scope: Scope, span: tracing.Span, status: int) -> None:
    if (route := getattr(scope.get("route"), "path", None)) is not None:
        span.rename(f"POST {route}")
        span.set({"http.route": route})
    if (failure := scope.get("state", {}).get("failure")) is not None:
        code = failure.error["code"]
        span.set({"tessera.error.code": code})
        # The client's own mistakes are no errors of the server.
        if status >= 500:
            span.fail(code)


def _headers(scope: Scope) -> dict[str, str]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in scope["headers"]:
        found[name.decode("latin-1").lower()].append(value.decode("latin-1"))
    # A list's lines may stand apart; a second traceparent makes both invalid.
    return {name: ",".join(values) for name, values in found.items()}
