"""Cohere's ``/v2/embed``."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tessera.frontend.api.cohere import SCHEMA, TYPES, parse_cohere, write_cohere
from tessera.frontend.api.endpoint import Endpoint, Translated
from tessera.frontend.api.request import RequestLimits
from tessera.frontend.api.schema import COHERE_ERROR, NUMBERS, WHOLE, list_of, object_of, operation
from tessera.frontend.api.values import Json

_TEXT: Final = {"type": "string"}
_ANSWER: Final = object_of(
    ("id", "response_type", "embeddings", "meta"),
    id=_TEXT,
    response_type={"const": "embeddings_by_type"},
    embeddings=object_of((), **{name: list_of(_TEXT if name == "base64" else NUMBERS) for name in TYPES}),
    texts=list_of(_TEXT),
    meta=object_of(
        ("api_version", "billed_units"),
        api_version=object_of(("version",), version=_TEXT),
        billed_units=object_of(("input_tokens",), input_tokens=WHOLE, images=WHOLE, image_tokens=WHOLE),
    ),
)


def translate(body: Json, limits: RequestLimits, models: Collection[str]) -> Translated:
    parsed = parse_cohere(body, limits, models)
    return Translated(request=parsed.request, write=partial(write_cohere, parsed))


def routes(endpoint: Endpoint) -> APIRouter:
    router = APIRouter(tags=["Cohere"])
    described = operation(body=SCHEMA, answer=_ANSWER, error=COHERE_ERROR)

    @router.post("/v2/embed", openapi_extra=described, summary="Embed texts, images or mixed inputs")
    async def embed(request: Request) -> Response:
        return await endpoint.embed(request, translate)

    return router
