"""Health for balancers, launch scripts and NIM clients, and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera.frontend.api.routes import ApiRoute, get_route
from tessera.frontend.api.schema import BOOLEAN, TEXT, WHOLE, object_of
from tessera.frontend.api.values import JsonObject
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.served import ServedModel
from tessera.tasks import KEEPER

_BY_COMPONENT: Final = object_of(embed=WHOLE, encode=WHOLE)
_MODEL: Final = object_of(
    status=TEXT,
    workers=_BY_COMPONENT,
    missing=_BY_COMPONENT,
    images=BOOLEAN,
)
_HEALTH: Final = object_of(
    status=TEXT,
    frontends=WHOLE,
    ready={"type": "array", "items": TEXT, "description": "The models that can be asked."},
    workers=_BY_COMPONENT,
    missing=_BY_COMPONENT,
    images=BOOLEAN,
    models={"type": "object", "additionalProperties": _MODEL},
)
_COMPONENTS: Final = ("embed", "encode")
_NONE: Final = dict.fromkeys(_COMPONENTS, 0)
_NOTHING: Final[JsonObject] = {"workers": _NONE, "missing": _NONE, "images": False}
_LEAVING: Final = "answers what is in flight"
_LIVE: Final = object_of(status=TEXT)
_NIM_HEAD: Final = {"object": "health.response"}
_NIM: Final = object_of(
    optional=("ready", "live"), object={"const": "health.response"}, message=TEXT, ready=BOOLEAN, live=BOOLEAN
)


def _model(service: Service, model: ServedModel) -> dict[str, Any]:
    embed, encode = model.workers.count
    least = service.group.reach(model.settings.name, embed, encode)
    workers = dict(zip(_COMPONENTS, least, strict=True))
    # Aggregated workers encode for themselves; others need an encode worker for images.
    vision = model.model.vision
    images = vision is not None and (
        (vision.gives_output and encode > 0)
        or any(
            info.role == "agg" or (info.images and encode > 0) for info in model.workers.embed.ready.values()
        )
    )
    return {
        "status": "ready" if embed else "not ready",
        "workers": workers,
        "missing": {name: max(0, model.expects(name) - count) for name, count in workers.items()},
        "images": images,
    }


def _sum(found: Sequence[dict[str, Any]], key: str) -> JsonObject:
    return {name: sum(model[key][name] for model in found) for name in _COMPONENTS}


def _routes(service: Service) -> list[ApiRoute]:
    async def health(request: Request) -> Response:
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
        return _answer(body, why_not)

    async def live(request: Request) -> Response:
        return _answer({"status": KEEPER.trouble or "live"}, KEEPER.trouble)

    async def nim_ready(request: Request) -> Response:
        why_not = service.not_ready()
        return _answer({**_NIM_HEAD, "message": why_not or "ready", "ready": not why_not}, why_not)

    async def nim_live(request: Request) -> Response:
        trouble = KEEPER.trouble
        return _answer({**_NIM_HEAD, "message": trouble or "live", "live": not trouble}, trouble)

    async def prometheus(request: Request) -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    probes = (
        ("/health", health, _HEALTH, "Whether a worker that can serve is there"),
        ("/ping", health, _HEALTH, "The same, as SageMaker asks for it"),
        ("/live", live, _LIVE, "Whether this process answers, and need not be replaced"),
        ("/v1/health/ready", nim_ready, _NIM, "NIM's readiness"),
        ("/v1/health/live", nim_live, _NIM, "NIM's liveness"),
    )
    return [
        *(get_route(path, answer, schema, 503, summary=text) for path, answer, schema, text in probes),
        # Balancers that only want the status.
        *(ApiRoute(path, answer, methods=("HEAD",)) for path, answer, *_ in probes),
        ApiRoute("/v1/metrics", prometheus, methods=("GET",), summary="The same where NIM has them"),
        ApiRoute("/metrics", prometheus, methods=("GET",), summary="Prometheus metrics"),
    ]


def _answer(body: JsonObject, trouble: str | None) -> Response:
    return JSONResponse(body, status_code=503 if trouble else 200)


API: Final = ClientApi("Health", _routes)
