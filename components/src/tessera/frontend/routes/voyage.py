"""Voyage's ``/v1/multimodalembeddings``."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tessera.frontend.api.endpoint import Endpoint, Translated
from tessera.frontend.api.request import RequestLimits
from tessera.frontend.api.schema import NUMBERS, VOYAGE_ERROR, WHOLE, list_of, object_of, operation
from tessera.frontend.api.values import Json
from tessera.frontend.api.voyage import SCHEMA, parse_voyage, write_voyage

_ANSWER: Final = object_of(
    ("object", "data", "model", "usage"),
    object={"const": "list"},
    data=list_of(
        object_of(
            ("object", "embedding", "index"),
            object={"const": "embedding"},
            embedding={"anyOf": [NUMBERS, {"type": "string"}]},
            index=WHOLE,
        )
    ),
    model={"type": "string"},
    usage=object_of(
        ("text_tokens", "image_pixels", "video_pixels", "total_tokens"),
        text_tokens=WHOLE,
        image_pixels=WHOLE,
        video_pixels=WHOLE,
        total_tokens=WHOLE,
    ),
)


def translate(body: Json, limits: RequestLimits, models: Collection[str]) -> Translated:
    request = parse_voyage(body, limits, models)
    return Translated(request=request, write=partial(write_voyage, request))


def routes(endpoint: Endpoint) -> APIRouter:
    router = APIRouter(tags=["Voyage"])
    described = operation(body=SCHEMA, answer=_ANSWER, error=VOYAGE_ERROR)

    @router.post("/v1/multimodalembeddings", openapi_extra=described, summary="Embed content parts")
    async def embed(request: Request) -> Response:
        return await endpoint.embed(request, translate)

    return router
