"""vLLM's ``/score`` and ``/v1/score``: pairs of a query and a document, answered in their order.

The two sides have one of four pairs of names, and each side is one item or a list: one query for all
documents, or one for each.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tessera.errors import InvalidInput
from tessera.frontend.api.endpoint import ALL_KINDS, TranslatedScores
from tessera.frontend.api.formats import ResponseBody
from tessera.frontend.api.openai import USAGE, usage_object
from tessera.frontend.api.schema import OPENAI_ERROR, WHOLE, Schema, body_of, list_of, object_of, operation
from tessera.frontend.api.scores import (
    DOCUMENTS_SCHEMA,
    OPTION_SCHEMAS,
    OPTIONS,
    SCORE,
    document_list,
    head,
    query_builder,
    read_documents,
    read_item,
    read_options,
    relevance,
    wants_logits,
)
from tessera.frontend.api.values import Json, JsonObject, request_body
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Scores
from tessera.frontend.serving.served import Served
from tessera.models.base import Truncate

PAIRS: Final = (
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
_SIDES: Final = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))
FIELDS: Final = frozenset((*_SIDES, *OPTIONS))

SCHEMA: Final[Schema] = {
    **body_of("ScoreRequest", (), **dict.fromkeys(_SIDES, DOCUMENTS_SCHEMA), **OPTION_SCHEMAS),
    "anyOf": [{"required": list(pair)} for pair in PAIRS],
}


def parse_score(value: Json, served: Served) -> TranslatedScores:
    body = request_body(value, FIELDS)
    made = read_options(body, unasked=Truncate.NONE)
    one, other = _sides(body)
    asked, given = (document_list(body.get(name), name, served.limits) for name in (one, other))
    if len(asked) not in (1, len(given)):
        raise InvalidInput(
            f"{one}: expected one for all of {other}, or one for each: lengths of 1:1, 1:N or N:N, found "
            f"{len(asked)}:{len(given)}",
            param=one,
        )
    builder = query_builder(body.get("instruction"), served.limits)
    queries = tuple(
        read_item(query, f"{one}[{index}]" if isinstance(body[one], list) else one, builder)
        for index, query in enumerate(asked)
    )
    documents = read_documents(given, other, served.limits)
    return TranslatedScores(
        request=made(queries=queries, documents=documents),
        write=partial(write_score, served.model, logits=wants_logits(body)),
    )


def write_score(model: str, scores: Scores, *, logits: bool) -> ResponseBody:
    data = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(relevance(scores, logits=logits))
    ]
    return ResponseBody.of_json(
        {**head("list", "score", scores, model), "data": data, "usage": usage_object(scores.usage)}
    )


def _sides(body: JsonObject) -> tuple[str, str]:
    given = {name for name in _SIDES if body.get(name) is not None}
    for pair in PAIRS:
        if given == set(pair):
            return pair
    known = ", ".join(f"{one} and {other}" for one, other in PAIRS)
    found = ", ".join(name for name in _SIDES if name in given) or "none"
    raise InvalidInput(
        f"expected one of the pairs {known}; found {found}", param=next(iter(given), _SIDES[0])
    )


_ANSWER: Final = object_of(
    ("id", "object", "created", "model", "data", "usage"),
    id={"type": "string"},
    object={"const": "list"},
    created=WHOLE,
    model={"type": "string"},
    data=list_of(
        object_of(("index", "object", "score"), index=WHOLE, object={"const": "score"}, score=SCORE)
    ),
    usage=USAGE,
)


def _routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["vLLM"])
    described = operation(body=SCHEMA, answer=_ANSWER, error=OPENAI_ERROR, kinds=ALL_KINDS)

    async def score(request: Request) -> Response:
        return await service.endpoint.score(request, parse_score)

    for path in ("/score", "/v1/score"):
        router.add_api_route(
            path, score, methods=["POST"], openapi_extra=described, summary="Score pairs of texts or images"
        )
    return router


API: Final = ClientApi(routes=_routes)
