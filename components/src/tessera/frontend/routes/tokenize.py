"""``/tokenize``: how an input is tokenised, with its prompt and its images' placeholders."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tessera.frontend.api.endpoint import Endpoint
from tessera.frontend.api.schema import OPENAI_ERROR, TEI_ERROR, WHOLE, list_of, object_of, operation
from tessera.frontend.api.tokenize import SCHEMA, parse_tokenize

_TOKENS: Final = list_of(WHOLE)
_TEXTS: Final = list_of({"type": "string"})
_PIECE: Final = object_of(
    ("id", "text", "special", "start", "stop"),
    id=WHOLE,
    text={"type": "string"},
    special={"type": "boolean"},
    start={"type": ["integer", "null"]},
    stop={"type": ["integer", "null"]},
)
_PLAIN: Final = object_of(
    ("count", "max_model_len"),
    count=WHOLE,
    max_model_len=WHOLE,
    tokens=_TOKENS,
    token_strs=_TEXTS,
    data=list_of(
        object_of(("index", "count", "tokens"), index=WHOLE, count=WHOLE, tokens=_TOKENS, token_strs=_TEXTS)
    ),
)
_ANSWER: Final = {"anyOf": [_PLAIN, list_of({"type": "array", "items": _PIECE})]}
_ERROR: Final = {"anyOf": [OPENAI_ERROR, TEI_ERROR]}


def routes(endpoint: Endpoint) -> APIRouter:
    router = APIRouter(tags=["Tessera"])
    described = operation(body=SCHEMA, answer=_ANSWER, error=_ERROR)

    @router.post("/tokenize", openapi_extra=described, summary="Count tokens without embedding")
    async def tokenize(request: Request) -> Response:
        """One input's ``tokens``, or ``data`` with those of each of several."""
        return await endpoint.tokenize(request, parse_tokenize)

    return router
