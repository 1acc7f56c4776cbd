"""NVIDIA's reranking NIM: ``/v1/ranking``, and the path of the hosted one, ``/v1/retrieval/MODEL/reranking``.

Passages come back by their index, all of them, the best first, with the model's logits: a model that has none
has no such route. Other keys are refused, as there; ``top_k`` is litellm's.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tessera.frontend.api.content import InputBuilder, read_object
from tessera.frontend.api.endpoint import TranslatedScores
from tessera.frontend.api.formats import ResponseBody
from tessera.frontend.api.openai import USAGE, usage_object
from tessera.frontend.api.schema import (
    STRING,
    WHOLE,
    WIDTH,
    Schema,
    body_of,
    list_of,
    object_of,
    operation,
)
from tessera.frontend.api.scores import ERROR, SCORE, document_builder, ranked, write_error
from tessera.frontend.api.values import (
    Json,
    choice,
    expected,
    non_empty_list,
    optional_positive,
    optional_string,
    reject_unknown,
    request_body,
    string,
)
from tessera.frontend.exchange import exchange_of
from tessera.frontend.request import Input, ScoreRequest
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Scores
from tessera.frontend.serving.served import Served
from tessera.models.base import OutputKind, Role, Truncate

FIELDS: Final = ("model", "query", "passages", "truncate", "top_k")
_TRUNCATE: Final = (Truncate.NONE, Truncate.END)
_SCORES: Final = frozenset((OutputKind.SCORE,))

SCHEMA: Final[Schema] = body_of(
    "RankingRequest",
    ("query", "passages"),
    model=STRING,
    query=object_of(("text",), text=STRING),
    passages=list_of(
        {
            "anyOf": [
                object_of(("text",), text=STRING, image=STRING),
                object_of(("image",), text={"type": "string"}, image=STRING),
            ]
        }
    ),
    truncate={"type": "string", "enum": [value.value for value in _TRUNCATE]},
    top_k=WIDTH,
)


def parse_ranking(value: Json, served: Served) -> TranslatedScores:
    body = request_body(value, FIELDS)
    limits = served.limits
    asked = body.get("query")
    if not isinstance(asked, dict):
        raise expected("query", "an object with a text", asked)
    reject_unknown(asked, ("text",), "query")
    query = InputBuilder(role=Role.QUERY, limits=limits)
    text = query.text(string(asked.get("text"), "query.text"), "query.text")
    builder = document_builder(limits)
    passages = tuple(
        _passage(passage, f"passages[{index}]", builder)
        for index, passage in enumerate(
            non_empty_list(body.get("passages"), "passages", most=limits.documents)
        )
    )
    request = ScoreRequest(
        queries=(query.build((text,), "query"),),
        documents=passages,
        model=optional_string(body, "model"),
        truncate=_truncate(body.get("truncate")),
    )
    return TranslatedScores(
        request=request, write=partial(write_ranking, most=optional_positive(body, "top_k"))
    )


def write_ranking(scores: Scores, *, most: int | None) -> ResponseBody:
    rankings = [{"index": index, "logit": logit} for index, logit in ranked(scores, logits=True, most=most)]
    return ResponseBody.of_json({"rankings": rankings, "usage": usage_object(scores.usage)})


def _passage(value: Json, param: str, builder: InputBuilder) -> Input:
    if not isinstance(value, dict):
        raise expected(param, "an object with text, image or both", value)
    reject_unknown(value, ("text", "image"), param)
    # NVIDIA's own clients send an empty text beside an image.
    if value.get("text") == "" and value.get("image") is not None:
        value = {"image": value["image"]}
    return read_object(value, param, builder)


def _truncate(value: Json) -> Truncate:
    chosen = Truncate.NONE if value is None else choice(value, "truncate", Truncate)
    if chosen not in _TRUNCATE:
        raise expected("truncate", "one of NONE, END", value)
    return chosen


_ANSWER: Final = object_of(
    ("rankings", "usage"),
    rankings=list_of(object_of(("index", "logit"), index=WHOLE, logit=SCORE)),
    usage=USAGE,
)


def _routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["NIM"])
    endpoint = service.endpoint
    described = operation(body=SCHEMA, answer=_ANSWER, error=ERROR, kinds=_SCORES)

    @router.post(
        "/v1/ranking", openapi_extra=described, summary="Order passages by their relevance to a query"
    )
    async def rank(request: Request) -> Response:
        return await endpoint.score(request, parse_ranking, kinds=_SCORES)

    @router.post(
        "/v1/retrieval/{name:path}/reranking",
        openapi_extra=described,
        responses={422: {}},
        summary="The same by the path of NVIDIA's hosted models",
    )
    async def rerank(name: str, request: Request) -> Response:
        # The middleware knows paths, and this is one of many.
        exchange_of(request.scope).error_shape = write_error
        return await endpoint.score(request, parse_ranking, kinds=_SCORES, name=name)

    return router


API: Final = ClientApi(routes=_routes, error=write_error)
