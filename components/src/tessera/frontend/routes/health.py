"""Health for balancers, launch scripts and NIM clients, and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from tessera.frontend.metrics import FrontendMetrics
from tessera.rpc import Peers


def routes(
    metrics: FrontendMetrics,
    embed_peers: Peers,
    encode_instances: Callable[[], int],
    draining: asyncio.Event,
) -> APIRouter:
    """``draining`` makes the service not ready, so that balancers look elsewhere."""
    router = APIRouter(tags=["Health"])
    not_ready: dict[int | str, dict[str, Any]] = {
        503: {"description": "no worker that can serve is there, or the service is draining"}
    }

    def is_ready() -> bool:
        return len(embed_peers.ready) > 0 and not draining.is_set()

    @router.get("/health", responses=not_ready, summary="Whether a worker that can serve is there")
    async def health() -> Response:
        workers = {"embed": len(embed_peers.ready), "encode": encode_instances()}
        # Aggregated workers encode for themselves; others need an encode worker for images.
        images = any(
            info.role == "agg" or (info.images and workers["encode"] > 0)
            for info in embed_peers.ready.values()
        )
        ready = is_ready()
        body = {"status": "ready" if ready else "not ready", "workers": workers, "images": images}
        return JSONResponse(body, status_code=200 if ready else 503)

    @router.get("/live", summary="Whether this process answers")
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @router.get("/v1/health/ready", responses=not_ready, summary="NIM's readiness")
    async def nim_ready() -> Response:
        ready = is_ready()
        body = {
            "object": "health.response",
            "message": "ready" if ready else "not ready",
            "ready": ready,
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    @router.get("/v1/health/live", summary="NIM's liveness")
    async def nim_live() -> Response:
        return JSONResponse({"object": "health.response", "message": "live", "live": True})

    @router.get("/metrics", summary="Prometheus metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
