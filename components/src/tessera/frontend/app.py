"""The HTTP application: the routes behind their gate, and where errors become answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tessera import __version__, tracing
from tessera.errors import RequestCancelled, TesseraError
from tessera.frontend import page
from tessera.frontend.api import docs, health
from tessera.frontend.api.endpoint import Endpoint
from tessera.frontend.api.status import StatusBoard
from tessera.frontend.api.values import clip
from tessera.frontend.http.admission import Admission, RateLimiter
from tessera.frontend.http.auth import Authenticator
from tessera.frontend.http.errors import Failure, failure_response, render, render_status
from tessera.frontend.http.middleware import OPEN_PATHS, Gate, Traced
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.page import Page
from tessera.frontend.routes import cohere, openai, status, tei, tokenize, voyage
from tessera.rpc import Peers

_DESCRIPTION = "Text and images in, vectors out; every common client's requests."


def make_app(
    endpoint: Endpoint,
    metrics: FrontendMetrics,
    embed_peers: Peers,
    encode_peers: Peers,
    *,
    keys: Authenticator,
    limiter: RateLimiter,
    admission: Admission,
    expected: Mapping[str, int],
    model: str,
    max_tokens: int,
    draining: asyncio.Event,
    board: StatusBoard,
    try_page: Page | None,
    open_metrics: bool,
) -> FastAPI:
    """Without ``try_page`` there is nothing at ``/``; with ``open_metrics`` a scrape needs no key."""
    app = FastAPI(
        title="Tessera",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        # It would be to whatever Host the client named.
        redirect_slashes=False,
    )
    # The page asks for a key itself, once the service has asked for one.
    open_paths = OPEN_PATHS | (try_page.paths if try_page else frozenset())
    if open_metrics:
        open_paths |= {"/metrics"}
    routers = [
        openai.routes(endpoint, model, max_tokens),
        cohere.routes(endpoint),
        voyage.routes(endpoint),
        tei.routes(endpoint),
        tokenize.routes(endpoint),
        health.routes(metrics, {"embed": embed_peers, "encode": encode_peers}, expected, draining),
        status.routes(board),
        docs.routes(app),
    ]
    app.add_middleware(
        Gate,
        keys=keys,
        limiter=limiter,
        admission=admission,
        metrics=metrics,
        open_paths=open_paths,
        routes=frozenset(
            route.path for router in routers for route in router.routes if isinstance(route, APIRoute)
        ),
    )
    if tracing.recording():
        # Outside the gate, so that what it refuses is seen.
        app.add_middleware(Traced)
    for router in routers:
        app.include_router(router)
    if try_page:
        app.include_router(page.routes(try_page))

    @app.exception_handler(TesseraError)
    async def tessera_error(request: Request, error: TesseraError) -> Response:
        if isinstance(error, RequestCancelled):
            metrics.disconnects.inc()
        return _failed(request, render(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        failure = render_status(error.status_code, _explanation(request, error))
        # Which methods a route takes, above all.
        failure.headers.update({name.lower(): value for name, value in (error.headers or {}).items()})
        return _failed(request, failure)

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


def _failed(request: Request, failure: Failure) -> Response:
    # The gate counts it.
    request.state.failure = failure
    # A body may be in another peer's form than its route's.
    return failure_response(failure, getattr(request.state, "answer_as", request.url.path))
