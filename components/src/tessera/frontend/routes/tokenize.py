"""``/tokenize``: how an input is tokenised, with its prompt and its images' placeholders."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tessera.frontend.endpoint import Endpoint
from tessera.frontend.routes.operation import OPENAI_ERROR, WHOLE, operation
from tessera.frontend.shapes.json_schema import list_of, object_of
from tessera.frontend.shapes.tokenize import SCHEMA, parse_tokenize

_TOKENS: Final = list_of(WHOLE)
_ANSWER: Final = object_of(
    ("count", "max_model_len"),
    count=WHOLE,
    max_model_len=WHOLE,
    tokens=_TOKENS,
    data=list_of(object_of(("index", "count", "tokens"), index=WHOLE, count=WHOLE, tokens=_TOKENS)),
)


def routes(endpoint: Endpoint) -> APIRouter:
    router = APIRouter(tags=["Tessera"])
    described = operation(body=SCHEMA, answer=_ANSWER, error=OPENAI_ERROR)

    @router.post("/tokenize", openapi_extra=described, summary="Count tokens without embedding")
    async def tokenize(request: Request) -> Response:
        """One input's ``tokens``, or ``data`` with those of each of several."""
        return await endpoint.tokenize(request, parse_tokenize)

    return router
