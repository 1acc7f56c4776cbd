"""Text-Embeddings-Inference's ``/embed``."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tessera.frontend.api.endpoint import Endpoint, Translated
from tessera.frontend.api.request import RequestLimits
from tessera.frontend.api.schema import NUMBERS, TEI_ERROR, list_of, operation
from tessera.frontend.api.tei import SCHEMA, parse_tei, write_tei
from tessera.frontend.api.values import Json


def translate(body: Json, limits: RequestLimits, models: Collection[str]) -> Translated:
    request = parse_tei(body, limits, models)
    return Translated(request=request, write=partial(write_tei, request))


def routes(endpoint: Endpoint) -> APIRouter:
    router = APIRouter(tags=["Text-Embeddings-Inference"])
    described = operation(body=SCHEMA, answer=list_of(NUMBERS), error=TEI_ERROR)

    @router.post("/embed", openapi_extra=described, summary="Embed text")
    async def embed(request: Request) -> Response:
        return await endpoint.embed(request, translate)

    return router
