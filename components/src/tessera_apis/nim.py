"""NVIDIA's reranking NIM: ``/v1/ranking``, and the path of the hosted one, ``/v1/retrieval/MODEL/reranking``.

Passages come back by their index, all of them, the best first, with the model's logits: a model that has none
has no such route. Other keys are refused, as there; ``top_k`` is litellm's.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

import msgspec

from tessera.frontend.api.body import Form, ModelName, MostResults, about, named, unread
from tessera.frontend.api.content import InputBuilder, read_object
from tessera.frontend.api.endpoint import TranslatedScores
from tessera.frontend.api.formats import ResponseBody
from tessera.frontend.api.openai import USAGE, usage_object
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import STRING, TEXT, WHOLE, list_of, object_of
from tessera.frontend.api.values import Json, known_object, non_empty_list, string
from tessera.frontend.request import Input, ScoreRequest
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Scores
from tessera.frontend.serving.served import Served
from tessera.models.base import OutputKind, Role, Truncate
from tessera_apis.scores import (
    DOCUMENTS_EXAMPLE,
    ERROR,
    QUERY_EXAMPLE,
    SCORE,
    document_builder,
    ranking,
    write_error,
)

_SCORES: Final = frozenset((OutputKind.SCORE,))
_TRUNCATE: Final = {value.value: value for value in (Truncate.NONE, Truncate.END)}
_TEXT: Final = object_of(optional=("image",), text=STRING, image=STRING)
_IMAGE: Final = object_of(optional=("text",), text=TEXT, image=STRING)


class RankingRequest(msgspec.Struct, kw_only=True):
    """Declares the body of both routes."""

    model: ModelName = None
    query: Annotated[
        Json, unread(object_of(text=STRING)), about("What is looked for.", {"text": QUERY_EXAMPLE})
    ]
    passages: Annotated[
        Json,
        unread(list_of({"anyOf": [_TEXT, _IMAGE]})),
        about("What is put in order.", [{"text": text} for text in DOCUMENTS_EXAMPLE]),
    ]
    truncate: Annotated[
        Truncate,
        named(_TRUNCATE),
        about("Whether a passage that is too long is cut at its end, or an error."),
    ] = Truncate.NONE
    top_k: MostResults = None


FORM: Final = Form(RankingRequest)


def parse_ranking(value: Json, served: Served) -> TranslatedScores:
    body, limits = FORM.read(value), served.limits
    asked = known_object(body.query, "query", "an object with a text", ("text",))
    query = InputBuilder(role=Role.QUERY, limits=limits)
    text = query.text(string(asked.get("text"), "query.text"), "query.text")
    builder = document_builder(limits)
    given = non_empty_list(body.passages, "passages", most=limits.documents)
    passages = tuple(_passage(passage, f"passages[{index}]", builder) for index, passage in enumerate(given))
    request = ScoreRequest(
        queries=(query.build((text,), "query"),),
        documents=passages,
        model=body.model,
        truncate=body.truncate,
    )
    return TranslatedScores(request=request, write=partial(write_ranking, most=body.top_k))


def write_ranking(scores: Scores, *, most: int | None) -> ResponseBody:
    rankings = ranking(scores, "logit", logits=True, most=most)
    return ResponseBody.of_json({"rankings": rankings, "usage": usage_object(scores.usage)})


def _passage(value: Json, param: str, builder: InputBuilder) -> Input:
    value = known_object(value, param, "an object with text, image or both", ("text", "image"))
    # NVIDIA's own clients send an empty text beside an image.
    if value.get("text") == "" and value.get("image") is not None:
        value = {"image": value["image"]}
    return read_object(value, param, builder)


_ANSWER: Final = object_of(
    rankings=list_of(object_of(index=WHOLE, logit=SCORE)),
    usage=USAGE,
)


def _routes(service: Service) -> list[ApiRoute]:
    return [
        service.endpoint.route(
            path,
            parse_ranking,
            name=name,
            summary=summary,
            body=FORM.schema,
            answer=_ANSWER,
            error=ERROR,
            kinds=_SCORES,
        )
        for path, name, summary in (
            ("/v1/ranking", "rank", "Order passages by their relevance to a query"),
            (
                "/v1/retrieval/{name:path}/reranking",
                "rerank",
                "The same by the path of NVIDIA's hosted models",
            ),
        )
    ]


API: Final = ClientApi("NIM", _routes, error=write_error, place=60)
