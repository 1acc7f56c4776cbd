"""OpenAI's routes: ``/v1/embeddings`` with every form of input, and ``/v1/models``."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera.errors import ModelNotFound
from tessera.frontend.api.endpoint import Endpoint, Translated
from tessera.frontend.api.formats import ResponseBody, Result, embeddings_body
from tessera.frontend.api.openai import EMBEDDINGS_SCHEMA, parse_embeddings
from tessera.frontend.api.request import EmbeddingsRequest, RequestLimits
from tessera.frontend.api.schema import (
    ERROR_OBJECT,
    NUMBERS,
    OPENAI_ERROR,
    WHOLE,
    answers,
    list_of,
    object_of,
    operation,
)
from tessera.frontend.api.values import Json

_ROW: Final[dict[str, Any]] = {
    **object_of(
        ("object", "index", "embedding"),
        object={"const": "embedding"},
        index=WHOLE,
        embedding={"anyOf": [NUMBERS, {"type": "string"}, {"type": "null"}]},
        error=ERROR_OBJECT,
    )
}
_USAGE: Final = object_of(
    ("prompt_tokens", "total_tokens", "prompt_tokens_details"),
    prompt_tokens=WHOLE,
    total_tokens=WHOLE,
    prompt_tokens_details=object_of(
        ("text_tokens", "image_tokens", "cached_tokens"),
        text_tokens=WHOLE,
        image_tokens=WHOLE,
        cached_tokens=WHOLE,
    ),
)
_ANSWER: Final = object_of(
    ("id", "object", "created", "model", "data", "usage"),
    id={"type": "string"},
    object={"const": "list"},
    created=WHOLE,
    model={"type": "string"},
    data=list_of(_ROW),
    usage=_USAGE,
)
_MODEL: Final = object_of(
    ("id", "object", "created", "owned_by", "max_model_len"),
    id={"type": "string"},
    object={"const": "model"},
    created=WHOLE,
    owned_by={"type": "string"},
    max_model_len=WHOLE,
)
_MODELS: Final = object_of(("object", "data"), object={"const": "list"}, data=list_of(_MODEL))
_OPERATION: Final = operation(
    body=EMBEDDINGS_SCHEMA,
    answer=_ANSWER,
    error=OPENAI_ERROR,
    application__octet_stream={"type": "string", "format": "binary"},
)


def translate(body: Json, limits: RequestLimits, models: Collection[str]) -> Translated:
    request = parse_embeddings(body, limits=limits, models=models)
    return Translated(request=request, write=partial(_write, request))


def _write(request: EmbeddingsRequest, result: Result) -> ResponseBody:
    return embeddings_body(
        result.embedded.vectors,
        request,
        model=result.model,
        identifier=f"embd-{result.request_id}",
        created=result.created,
        usage=result.embedded.usage,
        failures=result.embedded.errors,
    )


def routes(endpoint: Endpoint, model: str, max_tokens: int) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])
    card = {
        "id": model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "tessera",
        "max_model_len": max_tokens,
    }

    @router.post("/v1/embeddings", openapi_extra=_OPERATION, summary="Embed text and images")
    async def create_embeddings(request: Request) -> Response:
        return await endpoint.embed(request, translate)

    @router.get("/v1/models", openapi_extra=answers(_MODELS, 401), summary="The served model")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @router.get("/v1/models/{name:path}", openapi_extra=answers(_MODEL, 401, 404), summary="One model")
    async def get_model(name: str) -> Response:
        if name != model:
            raise ModelNotFound(f"the model {name!r} is not served here, {model!r} is", param="model")
        return JSONResponse(card)

    return router
