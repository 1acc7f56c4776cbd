"""Health for balancers, launch scripts and NIM clients, and the metrics."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from tessera.frontend.api.schema import WHOLE, Schema, answers, object_of
from tessera.frontend.service import ClientApi, Service

_TEXT: Final[Schema] = {"type": "string"}
_FLAG: Final[Schema] = {"type": "boolean"}
_BY_COMPONENT: Final = object_of(("embed", "encode"), embed=WHOLE, encode=WHOLE)
_HEALTH: Final = object_of(
    ("status", "frontends", "workers", "missing", "images"),
    status=_TEXT,
    frontends=WHOLE,
    workers=_BY_COMPONENT,
    missing=_BY_COMPONENT,
    images=_FLAG,
)
_NIM: Final = object_of(
    ("object", "message"), object={"const": "health.response"}, message=_TEXT, ready=_FLAG, live=_FLAG
)


def _routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["Health"])
    peers = service.workers.by_component

    def is_ready() -> bool:
        # A frontend that drains is not ready, so that balancers look elsewhere.
        return len(peers["embed"].ready) > 0 and not service.draining.is_set()

    @router.get(
        "/health", openapi_extra=answers(_HEALTH, 503), summary="Whether a worker that can serve is there"
    )
    async def health() -> Response:
        known = {component: len(found.ready) for component, found in peers.items()}
        frontends, *least = service.group.reach(known["embed"], known["encode"])
        workers = dict(zip(("embed", "encode"), least, strict=True))
        missing = {
            component: max(0, service.workers.expected[component] - count)
            for component, count in workers.items()
        }
        # Aggregated workers encode for themselves; others need an encode worker for images.
        images = service.model.vision is not None and any(
            info.role == "agg" or (info.images and known["encode"] > 0)
            for info in peers["embed"].ready.values()
        )
        ready = is_ready()
        body = {
            "status": "ready" if ready else "not ready",
            "frontends": frontends,
            "workers": workers,
            "missing": missing,
            "images": images,
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    router.add_api_route(
        "/ping",
        health,
        methods=["GET"],
        openapi_extra=answers(_HEALTH, 503),
        summary="The same, as SageMaker asks for it",
    )

    @router.get(
        "/live",
        openapi_extra=answers(object_of(("status",), status=_TEXT)),
        summary="Whether this process answers",
    )
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @router.get("/v1/health/ready", openapi_extra=answers(_NIM, 503), summary="NIM's readiness")
    async def nim_ready() -> Response:
        ready = is_ready()
        body = {
            "object": "health.response",
            "message": "ready" if ready else "not ready",
            "ready": ready,
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    @router.get("/v1/health/live", openapi_extra=answers(_NIM), summary="NIM's liveness")
    async def nim_live() -> Response:
        return JSONResponse({"object": "health.response", "message": "live", "live": True})

    for path, answer in (
        ("/health", health),
        ("/ping", health),
        ("/live", live),
        ("/v1/health/ready", nim_ready),
        ("/v1/health/live", nim_live),
    ):
        # Balancers that only want the status.
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    @router.get("/metrics", summary="Prometheus metrics")
    @router.get("/v1/metrics", summary="The same where NIM has them")
    async def prometheus() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


API: Final = ClientApi(routes=_routes)
