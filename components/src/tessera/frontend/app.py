"""The HTTP application: routes, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera import __version__
from tessera.errors import RequestCancelled, TesseraError
from tessera.frontend.embeddings import EmbeddingsRoute
from tessera.frontend.failures import Failure, render, render_status
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.shapes import EMBEDDINGS_BODY
from tessera.rpc import Peers

log = logging.getLogger(__name__)

CallNext = Callable[[Request], Awaitable[Response]]


def make_app(
    embeddings: EmbeddingsRoute,
    metrics: FrontendMetrics,
    embed_peers: Peers,
    encode_instances: Callable[[], int],
    *,
    model: str,
    max_tokens: int,
    draining: asyncio.Event,
) -> FastAPI:
    """Wire the routes; ``draining`` makes ``/health`` say no, so that balancers look elsewhere."""
    app = FastAPI(title="Tessera", version=__version__, description="Multimodal embeddings.")
    created = int(time.time())

    @app.post("/v1/embeddings", openapi_extra=EMBEDDINGS_BODY, summary="Embed text and images")
    async def create_embeddings(request: Request) -> Response:
        return await embeddings(request)

    @app.get("/v1/models", summary="The served model")
    async def list_models() -> Response:
        card = {
            "id": model,
            "object": "model",
            "created": created,
            "owned_by": "tessera",
            "max_model_len": max_tokens,
        }
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/health", summary="Whether a worker that can serve is there")
    async def health() -> Response:
        workers = {"embed": len(embed_peers.ready), "encode": encode_instances()}
        # Aggregated workers encode for themselves; others need an encode worker for images.
        images = any(
            info.role == "agg" or (info.images and workers["encode"] > 0)
            for info in embed_peers.ready.values()
        )
        ready = workers["embed"] > 0 and not draining.is_set()
        body = {"status": "ready" if ready else "not ready", "workers": workers, "images": images}
        return JSONResponse(body, status_code=200 if ready else 503)

    @app.get("/live", summary="Whether this process answers")
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @app.get("/metrics", summary="Prometheus metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(TesseraError)
    async def tessera_error(request: Request, error: TesseraError) -> Response:
        if isinstance(error, RequestCancelled):
            metrics.disconnects.inc()
        return _response(render(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return _response(render_status(error.status_code, str(error.detail)))

    @app.middleware("http")
    async def observe(request: Request, call_next: CallNext) -> Response:
        started = time.perf_counter()
        try:
            response = await call_next(request)
        except Exception as error:
            log.exception("%s %s failed", request.method, request.url.path)
            response = _response(render(error))
        route = getattr(request.scope.get("route"), "path", "other")
        metrics.requests.labels(route, str(response.status_code)).inc()
        metrics.latency.labels(route).observe(time.perf_counter() - started)
        return response

    return app


def _response(failure: Failure) -> Response:
    return Response(failure.body, status_code=failure.status, headers=failure.headers)
