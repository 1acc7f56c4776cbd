"""Health for balancers, launch scripts and NIM clients, and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from tessera.frontend.api.schema import TEXT, WHOLE, Schema, answers, object_of
from tessera.frontend.api.values import JsonObject
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.served import ServedModel
from tessera.tasks import KEEPER

_FLAG: Final[Schema] = {"type": "boolean"}
_BY_COMPONENT: Final = object_of(embed=WHOLE, encode=WHOLE)
_MODEL: Final = object_of(
    status=TEXT,
    workers=_BY_COMPONENT,
    missing=_BY_COMPONENT,
    images=_FLAG,
)
_HEALTH: Final = object_of(
    status=TEXT,
    frontends=WHOLE,
    ready={"type": "array", "items": TEXT, "description": "The models that can be asked."},
    workers=_BY_COMPONENT,
    missing=_BY_COMPONENT,
    images=_FLAG,
    models={"type": "object", "additionalProperties": _MODEL},
)
_COMPONENTS: Final = ("embed", "encode")
_NONE: Final = dict.fromkeys(_COMPONENTS, 0)
_NOTHING: Final[JsonObject] = {"workers": _NONE, "missing": _NONE, "images": False}
_LEAVING: Final = "answers what is in flight"
_NIM: Final = object_of(
    optional=("ready", "live"), object={"const": "health.response"}, message=TEXT, ready=_FLAG, live=_FLAG
)


def _model(service: Service, model: ServedModel) -> dict[str, Any]:
    embed, encode = model.workers.count
    least = service.group.reach(model.settings.name, embed, encode)
    workers = dict(zip(_COMPONENTS, least, strict=True))
    # Aggregated workers encode for themselves; others need an encode worker for images.
    images = model.model.vision is not None and any(
        info.role == "agg" or (info.images and encode > 0) for info in model.workers.embed.ready.values()
    )
    return {
        "status": "ready" if embed else "not ready",
        "workers": workers,
        "missing": {name: max(0, model.expects(name) - count) for name, count in workers.items()},
        "images": images,
    }


def _sum(found: Sequence[dict[str, Any]], key: str) -> JsonObject:
    return {name: sum(model[key][name] for model in found) for name in _COMPONENTS}


def _routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["Health"])

    @router.get(
        "/health", openapi_extra=answers(_HEALTH, 503), summary="Whether a worker that can serve is there"
    )
    async def health() -> Response:
        """With several models: whether one of them, or all, can be served, and of each the same."""
        models = {model.settings.name: _model(service, model) for model in service.models}
        found = list(models.values())
        others = service.models.waiting | dict.fromkeys(service.models.leaving, _LEAVING)
        why_not = service.not_ready()
        body = {
            "status": why_not or "ready",
            "frontends": service.group.answering,
            "ready": [name for name, model in models.items() if model["workers"]["embed"]],
            "workers": _sum(found, "workers"),
            "missing": _sum(found, "missing"),
            "images": any(model["images"] for model in found),
            "models": {name: {**_NOTHING, "status": why} for name, why in others.items()} | models,
        }
        return JSONResponse(body, status_code=503 if why_not else 200)

    router.add_api_route(
        "/ping",
        health,
        methods=["GET"],
        openapi_extra=answers(_HEALTH, 503),
        summary="The same, as SageMaker asks for it",
    )

    @router.get(
        "/live",
        openapi_extra=answers(object_of(status=TEXT), 503),
        summary="Whether this process answers, and need not be replaced",
    )
    async def live() -> Response:
        trouble = KEEPER.trouble
        return JSONResponse({"status": trouble or "live"}, status_code=503 if trouble else 200)

    @router.get("/v1/health/ready", openapi_extra=answers(_NIM, 503), summary="NIM's readiness")
    async def nim_ready() -> Response:
        why_not = service.not_ready()
        body = {"object": "health.response", "message": why_not or "ready", "ready": not why_not}
        return JSONResponse(body, status_code=503 if why_not else 200)

    @router.get("/v1/health/live", openapi_extra=answers(_NIM, 503), summary="NIM's liveness")
    async def nim_live() -> Response:
        trouble = KEEPER.trouble
        body = {"object": "health.response", "message": trouble or "live", "live": not trouble}
        return JSONResponse(body, status_code=503 if trouble else 200)

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
