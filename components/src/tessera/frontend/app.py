"""The HTTP application: every client's API behind the middleware, and where errors become answers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from operator import attrgetter
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tessera import tracing
from tessera.errors import ConfigError, RequestCancelled, TesseraError
from tessera.frontend import page
from tessera.frontend.api import docs, health, metadata, openai, status
from tessera.frontend.api.routes import openapi
from tessera.frontend.api.values import clip
from tessera.frontend.exchange import exchange_of
from tessera.frontend.http.access_log import METRICS_PATHS
from tessera.frontend.http.errors import failure_response, openai_error, release, render, render_status
from tessera.frontend.http.middleware import OPEN_PATHS, RequestMiddleware, Routes, TraceMiddleware
from tessera.frontend.page import Page
from tessera.frontend.service import ClientApi, Service
from tessera.models.base import OutputKind
from tessera.siblings import CLIENT_APIS, load, siblings

APIS: Final[tuple[ClientApi, ...]] = (
    openai.API,
    *sorted((load(entry) for entry in siblings(CLIENT_APIS)), key=attrgetter("place")),
    health.API,
    metadata.API,
    status.API,
)
"""In the order in which ``/docs`` lists them."""


def make_app(service: Service, added: Iterable[ClientApi] = ()) -> ASGIApp:
    """Without a page in the settings ``/`` is not found; with ``open_metrics`` a scrape needs no key.

    ``added`` are the APIs of doors, behind its own. Raises ``ConfigError`` where two APIs have one path.
    """
    try_page = Page() if service.settings.page else None
    # The page asks for a key itself, once the service has asked for one.
    open_paths = OPEN_PATHS | (try_page.paths if try_page else frozenset())
    if service.settings.access.open_metrics:
        open_paths |= METRICS_PATHS
    apis = (*APIS, *added)
    open_paths = open_paths.union(*(api.open_paths for api in apis))
    of_apis = [(api, route) for api in apis for route in api.routes(service)]
    owners: dict[str, ClientApi] = {}
    for api, route in of_apis:
        if (owner := owners.setdefault(route.path, api)) is not api:
            raise ConfigError(f"{route.path}: {owner.name} and {api.name} cannot both answer there")
    error_shapes = {path: api.error for path, api in owners.items()}
    for kind in OutputKind:
        service.routes[kind] = [route.path_format for _, route in of_apis if kind.value in route.outputs]

    def failed(request: Request, error: TesseraError | HTTPException) -> Response:
        exchange = exchange_of(request.scope)
        path = exchange.path
        if isinstance(error, HTTPException):
            failure = render_status(error.status_code, _explanation(request, error))
            # Which methods a route takes, above all.
            failure.headers.update({name.lower(): value for name, value in (error.headers or {}).items()})
        else:
            if isinstance(error, RequestCancelled):
                service.metrics.disconnects.inc()
            release(error)
            failure, path = render(error), request.scope["route"].path
        # The middleware counts it.
        exchange.failure = failure
        # A body may be in another client's form than its route's.
        return failure_response(failure, exchange.error_shape or error_shapes.get(path, openai_error))

    routes = [route for _, route in of_apis]
    routes += docs.routes(cache(lambda: openapi((api.name, route) for api, route in of_apis)))
    if try_page:
        routes += page.routes(try_page)
    guarded = RequestMiddleware(
        Routes(routes, failed),
        keys=service.keys,
        limiter=service.limiter,
        admission=service.admission,
        metrics=service.metrics,
        open_paths=open_paths,
        error_shapes=error_shapes,
        waiting={prefix: api.error for api in apis for prefix in api.waits_below},
        timeout_seconds=service.settings.limits.timeout_seconds,
        access_log_share=service.settings.access_log_share,
        drains=service.draining.is_set,
    )
    if not tracing.recording() and not service.settings.cors.allow_origins:
        service.refuse_at_once = guarded.refuse_at_once
    # Outside the other, so that what it refuses is seen, and by browsers, too.
    return service.settings.cors.around(TraceMiddleware(guarded) if tracing.recording() else guarded)


def _explanation(request: Request, error: HTTPException) -> str:
    """Starlette's words for an unknown route or a wrong method name neither."""
    asked = f"{request.method} {clip(request.url.path)}"
    match error.status_code:
        case 404:
            return f"there is no route {asked}; GET /docs lists them"
        case 405:
            return f"{asked}: this route takes {(error.headers or {}).get('Allow', 'another method')}"
        case _:
            return str(error.detail)
