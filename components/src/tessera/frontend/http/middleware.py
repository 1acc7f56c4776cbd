"""What every HTTP request passes first and last: its id, trace, API key, admission, counters and log line."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import orjson
from opentelemetry.trace import Span
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera import tracing
from tessera.errors import RateLimited, TesseraError, Unavailable
from tessera.frontend.admission.rate import RateLimiter
from tessera.frontend.admission.room import Admission
from tessera.frontend.exchange import Exchange
from tessera.frontend.http.access_log import OTHER, AccessLog
from tessera.frontend.http.auth import Authenticator
from tessera.frontend.http.connection import Answer
from tessera.frontend.http.errors import (
    ErrorShape,
    Failure,
    openai_error,
    render,
    render_status,
)
from tessera.frontend.metrics import FrontendMetrics
from tessera.logs import note, serving
from tessera.tasks import own_cancellation


class TraceMiddleware:
    """A span for each POST request, in the trace that the client names if it names one.

    Probes and scrapes are no work and leave no span. OpenTelemetry's own layer puts the query into the span,
    where a client may have put a key, and knows no request ids.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
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
                    headers["traceresponse"] = tracing.traceparent(span)
                await send(message)

            try:
                await self._app(scope, receive, sending)
            finally:
                span.set_attributes({"http.response.status_code": status, "tessera.request_id": request_id})
                _conclude(scope, span, status)


def _conclude(scope: Scope, span: Span, status: int) -> None:
    if (route := getattr(scope.get("route"), "path", None)) is not None:
        span.update_name(f"POST {route}")
        span.set_attributes({"http.route": route})
    exchange: Exchange | None = scope.get("state", {}).get("exchange")
    if exchange is None:
        return
    if exchange.model:
        span.set_attributes({"tessera.model": exchange.model})
    if exchange.failure is not None:
        code = exchange.failure.error["code"]
        span.set_attributes({"tessera.error.code": code})
        # The client's own mistakes are no errors of the server.
        if status >= 500:
            tracing.fail(span, str(code))


def _headers(scope: Scope) -> dict[str, str]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in scope["headers"]:
        found[name.decode("latin-1").lower()].append(value.decode("latin-1"))
    # A list's lines may stand apart; a second traceparent makes both invalid.
    return {name: ",".join(values) for name, values in found.items()}


OPEN_PATHS = frozenset(
    (
        *("/health", "/live", "/ping"),
        *("/v1/health/ready", "/v1/health/live"),
    )
)
"""Answered without an API key, because balancers and kubelets have none; a POST is never."""


def answer_counts(
    metrics: FrontendMetrics,
) -> Callable[[str, int, str | None, str], Callable[[float], None]]:
    """Return what counts answers by their seconds, for a route, a status, an error's code and a model.

    Of these there are few, and each series is bound once: finding one takes longer than counting in it. The
    name of the model is empty where it was not known.
    """

    @cache
    def of(route: str, status: int, code: str | None, model: str) -> Callable[[float], None]:
        requests = metrics.requests.labels(route, str(status), model).inc
        latency = metrics.latency.labels(route, model).observe
        errors = metrics.errors.labels(route, code, model).inc if code is not None else None

        def count(seconds: float) -> None:
            requests()
            latency(seconds)
            if errors is not None:
                errors()

        return count

    return of


class RequestMiddleware:
    """Opens the exchange of each request; refuses before the body is read.

    ``error_shapes`` are by path, for every route of the application: a request that is refused here is
    counted under its route. ``waiting`` has the shapes of paths by what they begin with, whose routes wait
    for room themselves. Exceptions that no handler knows become the 500 here. ``keys`` is None
    where the service is open to all, ``limiter`` where no key has a rate. What is cancelled
    while the service ``drains`` gets 503.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Authenticator | None,
        limiter: RateLimiter | None,
        admission: Admission,
        metrics: FrontendMetrics,
        open_paths: frozenset[str] = OPEN_PATHS,
        error_shapes: Mapping[str, ErrorShape] | None = None,
        waiting: Mapping[str, ErrorShape] | None = None,
        timeout_seconds: float = math.inf,
        access_log_share: float = 1.0,
        drains: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._drains = drains
        self._seconds = timeout_seconds
        self._waiting = waiting or {}
        self._waits_below = tuple(self._waiting)
        self._keys = keys
        self._limiter = limiter
        self._admission = admission
        self._metrics = metrics
        self._open_paths = open_paths
        self._error_shapes = error_shapes or {}
        self._log = AccessLog(open_paths, access_log_share)
        self._count = answer_counts(metrics)
        # Bound once: finding a series takes longer than counting in it.
        self._refused = {why: metrics.refused.labels(why).inc for why in ("unknown key", "rate", "full")}

    def refuse_at_once(self, scope: Scope) -> Answer | None:
        """Answer one more request in a flood of those that find the service full; None for all others.

        A call of this object would answer and count alike and write no line either, in a task of its own and
        past all layers around it: 0.2 ms more where engines run on the same cores.
        """
        return self._refuse_in_flood(scope) if self._log.refusals.none_passes() else None

    def _refuse_in_flood(self, scope: Scope) -> Answer | None:
        path = scope["path"]
        if scope["method"] != "POST" or path not in self._error_shapes or self._waits(path):
            return None
        started = time.perf_counter()
        exchange = Exchange.open(scope)
        if self._keys is not None and not self._has_key(exchange, self._keys):
            return None
        overloaded = self._admission.refusal(exchange.client, exchange.body_bytes)
        if overloaded is None:
            return None
        self._refused["full"]()
        answer = self._failed(failure := render(overloaded), exchange)
        self._count(path, answer.status, failure.error["code"], "")(time.perf_counter() - started)
        self._log.refusals.passes()
        return answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.open(scope, self._limiter, seconds=self._seconds)
        exchange.bodies = self._admission.bodies
        with serving(exchange.line):
            note(trace_id=tracing.trace_id() or None)
            await self._answer(exchange, scope, receive, send)

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        status, seconds = 0, math.nan
        refused = False

        async def sending(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                exchange.let_go()
                status = message["status"]
                headers = message["headers"]
                if not any(name == b"x-request-id" for name, _ in headers):
                    headers.append((b"x-request-id", exchange.line.request_id.encode("latin-1")))
            elif not message.get("more_body"):
                # What is left is the client's own time to read.
                seconds = time.perf_counter() - started
                if exchange.ticket is not None:
                    exchange.ticket.leave_room()
            await send(message)

        try:
            if refused := self._refuses(exchange):
                # The body is not even read.
                await self._send_failure(exchange, sending)
            else:
                with own_cancellation():
                    await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            # Nobody else cancels a request: who hangs up is no longer waited for.
            if status or not self._drains() or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
            exchange.failure = render(Unavailable("the service ends, and waits for this request no longer"))
            await self._send_failure(exchange, sending)
        except Exception as error:
            exchange.unexpected = error
            if status:
                raise
            exchange.failure = render(error)
            await self._send_failure(exchange, sending)
        finally:
            exchange.leave()
            # The connection keeps its last request's scope for as long as it waits for the next one.
            exchange.let_go()
            route = self._route(scope)
            if math.isnan(seconds):
                seconds = time.perf_counter() - started
            code = None if exchange.failure is None else exchange.failure.error["code"]
            self._count(route, status, code, exchange.model)(seconds)
            self._log.write(exchange, route=route, status=status, seconds=seconds, unread=refused)
            exchange.unexpected = None

    def _route(self, scope: Scope) -> str:
        """Return the route's path, for metrics: all unknown paths count as one."""
        matched = scope.get("route")
        if matched is not None:
            return str(matched.path)
        # What was refused here has not come to the router.
        return scope["path"] if scope["path"] in self._error_shapes else OTHER

    async def _send_failure(self, exchange: Exchange, send: Send) -> None:
        """Send a failure without a ``Response``, which takes as long as all else about a refusal."""
        assert exchange.failure is not None
        status, headers, body = self._failed(exchange.failure, exchange)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _failed(self, failure: Failure, exchange: Exchange) -> Answer:
        status, content = self._shape(exchange.path)(failure)
        body = orjson.dumps(content)
        headers = [
            *((name.encode("latin-1"), value.encode("latin-1")) for name, value in failure.headers.items()),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", exchange.line.request_id.encode("latin-1")),
        ]
        return Answer(status, headers, body)

    def _waits(self, path: str) -> bool:
        return path.startswith(self._waits_below)

    def _shape(self, path: str) -> ErrorShape:
        for prefix, shape in self._waiting.items():
            if path.startswith(prefix):
                return shape
        return self._error_shapes.get(path, openai_error)

    def _refuses(self, exchange: Exchange) -> bool:
        """Return whether the request is refused for its key, its rate or for want of room."""
        if exchange.path in self._open_paths and exchange.method != "POST":
            return False
        if self._keys is not None and not self._has_key(exchange, self._keys):
            exchange.failure = self._unknown_key()
            return True
        if exchange.method == "POST":
            try:
                exchange.ticket = self._admission.enter(exchange.client, exchange.body_bytes)
                exchange.count()
            except TesseraError as error:
                return self._turns_away(exchange, error)
        return False

    def _has_key(self, exchange: Exchange, keys: Authenticator) -> bool:
        """Return whether a request comes with a known key, whose client it then counts for."""
        key = keys.name_of(exchange.headers)
        if key is None:
            return False
        exchange.key = exchange.client = key
        return True

    def _unknown_key(self) -> Failure:
        self._refused["unknown key"]()
        failure = render_status(401, "the API key is missing or not known; send Authorization: Bearer KEY")
        failure.headers["www-authenticate"] = 'Bearer realm="tessera"'
        return failure

    def _turns_away(self, exchange: Exchange, error: TesseraError) -> bool:
        """Return whether a request without room or rate is refused: some routes wait for room."""
        rate = isinstance(error, RateLimited)
        if not rate and self._waits(exchange.path):
            return False
        self._refused["rate" if rate else "full"]()
        exchange.failure = render(error)
        return True


class Routes:
    """Answers by the functions of routes; ``failed`` answers for a ``TesseraError`` and an ``HTTPException``.

    Starlette's router looks at the routes one by one, and has layers around each function: this one finds
    whole paths at once.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        failed: Callable[[Request, TesseraError | HTTPException], Response],
    ) -> None:
        self._routes = routes
        self._failed = failed
        self._by_path = {
            (method, route.path): route
            for route in reversed(routes)
            for method in (route.methods or ())
            if not route.param_convertors
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            route = self._by_path.get((scope["method"], scope["path"])) or self._find(scope)
            scope["route"] = route
            response = await route.endpoint(request)
        except (TesseraError, HTTPException) as error:
            response = self._failed(request, error)
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> Route:
        """Return the route of a path that names something; raises ``HTTPException`` for 404 and 405."""
        other: Route | None = None
        for route in self._routes:
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                return route
            if match is Match.PARTIAL and other is None:
                other = scope["route"] = route
        if other is None:
            raise HTTPException(404)
        raise HTTPException(405, headers={"Allow": ", ".join(other.methods or ())})
