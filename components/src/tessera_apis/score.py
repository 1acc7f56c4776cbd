"""vLLM's ``/score`` and ``/v1/score``: pairs of a query and a document, answered in their order.

The two sides have one of four pairs of names, and each side is one item or a list: one query for all
documents, or one for each.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

from tessera.errors import InvalidInput
from tessera.frontend.api.body import Form, about, unread
from tessera.frontend.api.endpoint import DENSE, TranslatedScores
from tessera.frontend.api.formats import ResponseBody
from tessera.frontend.api.openai import USAGE, usage_object
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import WHOLE, answer_of, list_of, object_of
from tessera.frontend.api.values import Json, is_list
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Scores
from tessera.frontend.serving.served import Served
from tessera.models.base import OutputKind, Truncate
from tessera_apis.scores import (
    DOCUMENTS_EXAMPLE,
    DOCUMENTS_SCHEMA,
    QUERY_EXAMPLE,
    SCORE,
    SCORE_INERT,
    ScoreOptions,
    document_list,
    head,
    query_builder,
    read_documents,
    read_item,
    relevance,
)

PAIRS: Final = (
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
_SIDES: Final = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))
_Asked = Annotated[
    Json,
    unread(DOCUMENTS_SCHEMA),
    about("One side of the pairs: one for all of the other, or one for each.", QUERY_EXAMPLE),
]
_Other = Annotated[Json, unread(DOCUMENTS_SCHEMA), about("The other side of the pairs.", DOCUMENTS_EXAMPLE)]


class ScoresRequest(ScoreOptions, kw_only=True):
    """Declares the body of both routes, which has one pair of sides."""

    queries: _Asked = None
    documents: _Other = None
    items: _Other = None
    text_1: _Asked = None
    text_2: _Other = None
    data_1: _Asked = None
    data_2: _Other = None


FORM: Final = Form(
    ScoresRequest,
    inert=SCORE_INERT,
    title="ScoreRequest",
    anyOf=[{"required": list(pair)} for pair in PAIRS],
)


def parse_score(value: Json, served: Served) -> TranslatedScores:
    body, limits = FORM.read(value), served.limits
    one, other = _sides(body)
    first, second = getattr(body, one), getattr(body, other)
    asked, given = document_list(first, one, limits), document_list(second, other, limits)
    if len(asked) not in (1, len(given)):
        raise InvalidInput.at(
            one,
            f"expected one for all of {other}, or one for each: lengths of 1:1, 1:N or N:N, found "
            f"{len(asked)}:{len(given)}",
        )
    builder = query_builder(body.instruction, limits)
    queries = tuple(
        read_item(query, f"{one}[{index}]" if is_list(first) else one, builder)
        for index, query in enumerate(asked)
    )
    documents = read_documents(given, other, limits)
    return TranslatedScores(
        request=body.request(queries, documents, unasked=Truncate.NONE),
        write=partial(write_score, served.model, logits=body.wants_logits()),
    )


def write_score(model: str, scores: Scores, *, logits: bool) -> ResponseBody:
    data = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(relevance(scores, logits=logits))
    ]
    return ResponseBody.of_json(
        {**head("list", "score", scores, model), "data": data, "usage": usage_object(scores.usage)}
    )


def _sides(body: ScoresRequest) -> tuple[str, str]:
    given = {name for name in _SIDES if getattr(body, name) is not None}
    for pair in PAIRS:
        if given == set(pair):
            return pair
    known = ", ".join(f"{one} and {other}" for one, other in PAIRS)
    found = ", ".join(name for name in _SIDES if name in given) or "none"
    raise InvalidInput(
        f"expected one of the pairs {known}; found {found}", param=next(iter(given), _SIDES[0])
    )


_ANSWER: Final = answer_of(
    "list",
    data=list_of(object_of(index=WHOLE, object={"const": "score"}, score=SCORE)),
    usage=USAGE,
)


def _routes(service: Service) -> list[ApiRoute]:
    return [
        service.endpoint.route(
            path,
            parse_score,
            name="score",
            summary="Score pairs of texts or images",
            body=FORM.schema,
            answer=_ANSWER,
            kinds=DENSE,
            first=OutputKind.SCORE,
        )
        for path in ("/score", "/v1/score")
    ]


API: Final = ClientApi("vLLM", _routes, place=50)
