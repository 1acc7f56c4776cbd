"""The HTTP application: every client's API behind the middleware, and where errors become answers."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Final, TypeGuard

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from tessera import __version__, tracing
from tessera.errors import RequestCancelled, TesseraError
from tessera.frontend import page
from tessera.frontend.api import (
    cohere,
    docs,
    health,
    metadata,
    nim,
    openai,
    pooling,
    rerank,
    score,
    status,
    tei,
    tokenize,
    voyage,
)
from tessera.frontend.api.schema import OUTPUTS
from tessera.frontend.api.values import clip
from tessera.frontend.exchange import exchange_of
from tessera.frontend.http.access_log import METRICS_PATHS
from tessera.frontend.http.errors import (
    Failure,
    failure_response,
    openai_error,
    release,
    render,
    render_status,
)
from tessera.frontend.http.middleware import (
    OPEN_PATHS,
    Application,
    RequestMiddleware,
    TraceMiddleware,
    Waiting,
)
from tessera.frontend.page import Page
from tessera.frontend.service import ClientApi, Service
from tessera.models.base import OutputKind

APIS: Final[tuple[ClientApi, ...]] = (
    openai.API,
    cohere.API,
    voyage.API,
    tei.API,
    rerank.API,
    score.API,
    nim.API,
    pooling.API,
    tokenize.API,
    health.API,
    metadata.API,
    status.API,
    docs.API,
)
"""In the order in which ``/docs`` lists them."""

_DESCRIPTION: Final = "Text and images in, vectors or scores out; every common client's requests."


def _takes_the_request(route: BaseRoute) -> TypeGuard[APIRoute]:
    return (
        isinstance(route, APIRoute)
        and route.methods == {"POST"}
        and list(signature(route.endpoint).parameters) == ["request"]
    )


def make_app(service: Service, added: Iterable[ClientApi] = ()) -> Application:
    """Without a page in the settings ``/`` is not found; with ``open_metrics`` a scrape needs no key.

    ``added`` are the APIs of doors, behind its own.
    """
    try_page = Page() if service.settings.page else None
    # The page asks for a key itself, once the service has asked for one.
    open_paths = OPEN_PATHS | (try_page.paths if try_page else frozenset())
    if service.settings.access.open_metrics:
        open_paths |= METRICS_PATHS
    apis = (*APIS, *added)
    open_paths = open_paths.union(*(api.open_paths for api in apis))
    routers = [(api, api.routes(service)) for api in apis]
    error_shapes = {
        route.path: api.error
        for api, router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
    }

    for kind in OutputKind:
        service.routes[kind] = [
            route.path_format
            for _, router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and kind.value in (route.openapi_extra or {}).get(OUTPUTS, ())
        ]

    def around(routes: ASGIApp) -> ASGIApp:
        guarded = RequestMiddleware(
            routes,
            keys=service.keys,
            limiter=service.limiter,
            admission=service.admission,
            metrics=service.metrics,
            open_paths=open_paths,
            error_shapes=error_shapes,
            waiting=[Waiting(api.waits_below, api.error) for api in apis if api.waits_below],
            timeout_seconds=service.settings.limits.timeout_seconds,
            access_log_share=service.settings.access_log_share,
        )
        # Outside the other, so that what it refuses is seen, and by browsers, too.
        traced = TraceMiddleware(guarded) if tracing.recording() else guarded
        return service.settings.cors.around(traced)

    def answer(request: Request, failure: Failure) -> Response:
        exchange = exchange_of(request.scope)
        # The middleware counts it.
        exchange.failure = failure
        # A body may be in another client's form than its route's.
        shape = exchange.error_shape or error_shapes.get(exchange.path, openai_error)
        return failure_response(failure, shape)

    def failed(request: Request, error: TesseraError) -> Response:
        if isinstance(error, RequestCancelled):
            service.metrics.disconnects.inc()
        release(error)
        return answer(request, render(error))

    app = Application(
        {route.path: route for _, router in routers for route in router.routes if _takes_the_request(route)},
        around,
        failed,
        title="Tessera",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        # It would be to whatever Host the client named.
        redirect_slashes=False,
    )
    for _, router in routers:
        app.include_router(router)
    if try_page:
        app.include_router(page.routes(try_page))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        failure = render_status(error.status_code, _explanation(request, error))
        # Which methods a route takes, above all.
        failure.headers.update({name.lower(): value for name, value in (error.headers or {}).items()})
        return answer(request, failure)

    return app


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
