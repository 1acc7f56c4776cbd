"""``/v1/rerank``, ``/v2/rerank`` and ``/rerank``, which several clients mean different things by.

======================  ===========================  ===================================
a body with             is                           and is answered
======================  ===========================  ===================================
``texts``               TEI's, on ``/rerank``        a bare list
``top_k``, or           Voyage's, on ``/v1/rerank``  ``data``
``truncation``          and ``/rerank``
anything else           Cohere's, Jina's, vLLM's     ``results``, with what each of them
                        or Infinity's                reads around them
======================  ===========================  ===================================

Nobody can tell the last four apart. Documents come back where ``return_documents`` is true, which is what
Cohere, Voyage and Infinity do; Jina would send them unless it is false, and vLLM always. A document that is
too long loses its end, which is what all but vLLM do. Errors have all their shapes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tessera.frontend.api.body import Flag, Form, Kind, about, several, unread, whole
from tessera.frontend.api.endpoint import DENSE, Choice, TranslatedScores
from tessera.frontend.api.formats import ResponseBody
from tessera.frontend.api.openai import USAGE, usage_object
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import STRING, TEXT, WHOLE, Schema, answer_of, list_of, object_of, operation
from tessera.frontend.api.values import Json, json_object, string
from tessera.frontend.exchange import Exchange, exchange_of
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Scores
from tessera.frontend.serving.served import Served
from tessera.models.base import OutputKind, Truncate
from tessera_apis import tei, voyage
from tessera_apis.scores import (
    DOCUMENTS_EXAMPLE,
    DOCUMENTS_SCHEMA,
    ERROR,
    QUERY_EXAMPLE,
    QUERY_SCHEMA,
    SCORE,
    SCORE_INERT,
    ScoreOptions,
    document_list,
    head,
    query_builder,
    ranking,
    read_documents,
    read_item,
    write_error,
)

INERT: Final[dict[str, tuple[Json, ...]]] = {
    **SCORE_INERT,
    # A long document is cut, and not into pieces of which the best counts.
    "max_chunks_per_doc": (1,),
    "relevant_spans": ({"mode": "disabled"},),
}
V1: Final = "/v1/rerank"
V2: Final = "/v2/rerank"
BARE: Final = "/rerank"
# What Cohere bills as one search.
_DOCUMENTS_A_UNIT: Final = 100


class RerankRequest(ScoreOptions, kw_only=True):
    """Declares the body that Cohere, Jina, vLLM and Infinity share."""

    query: Annotated[
        Json, unread(QUERY_SCHEMA), about("What is looked for: text, image or both.", QUERY_EXAMPLE)
    ]
    documents: Annotated[
        Json,
        unread(DOCUMENTS_SCHEMA),
        about("What is put in order: texts, or objects with text, image or content.", DOCUMENTS_EXAMPLE),
    ]
    # vLLM's 0 is all.
    top_n: Annotated[
        int | None, whole("a number of documents", 0), about("The most results; 0 for all.", 3)
    ] = None
    return_documents: Annotated[
        Flag, Meta(description="Whether each result has its document; false unless given.")
    ] = False
    rank_fields: Annotated[
        tuple[str, ...],
        several(Kind(string, STRING), most=64),
        about("The keys of documents that are objects to rank by.", ["title", "text"]),
    ] = ()


FORM: Final = Form(RerankRequest, inert=INERT)


def parse_rerank(value: Json, served: Served, path: str) -> TranslatedScores:
    body, limits = FORM.read(value), served.limits
    query = read_item(body.query, "query", query_builder(body.instruction, limits))
    given = document_list(body.documents, "documents", limits)
    documents = read_documents(given, "documents", limits, body.rank_fields)
    request = body.request((query,), documents, unasked=Truncate.DECLARED)
    returned = given if body.return_documents else ()
    logits, most = body.wants_logits(), body.top_n or None
    write = partial(write_rerank, path, served.model, returned, logits=logits, most=most)
    copies = 0 if not returned else 2 if path == V1 else 1
    return TranslatedScores(request=request, write=write, copies=copies)


def write_rerank(
    path: str, model: str, documents: Sequence[Json], scores: Scores, *, logits: bool, most: int | None
) -> ResponseBody:
    """``documents`` are those that come back, as the client sent them; a text as ``{"text"}``."""
    returned = [{"text": entry} if isinstance(entry, str) else entry for entry in documents]
    results = ranking(scores, "relevance_score", logits=logits, most=most, document=returned)
    usage = scores.usage
    body = {
        **head("rerank", "rerank", scores, model),
        "results": results,
        "usage": usage_object(usage),
        "meta": {
            "api_version": {"version": "2" if path == V2 else "1"},
            "billed_units": {"search_units": -(-len(scores.values) // _DOCUMENTS_A_UNIT)},
            "tokens": {"input_tokens": usage.total_tokens, "output_tokens": 0},
        },
    }
    if path == V1:
        # For litellm's requests to Voyage, which say ``top_k`` only where they are given one.
        body["data"] = results
    return ResponseBody.of_json(body)


def _translate(exchange: Exchange, value: Json, served: Served) -> TranslatedScores:
    body, path = json_object(value), exchange.path
    # Errors from here on have the shape that goes with the form.
    if path == BARE and "texts" in body:
        exchange.error_shape = tei.write_error
        return tei.parse_rerank(body, served)
    if path != V2 and not body.keys().isdisjoint(voyage.RERANK_ONLY):
        exchange.error_shape = voyage.write_error
        return voyage.parse_rerank(body, served)
    return parse_rerank(body, served, path)


def _described(path: str) -> dict[str, Any]:
    """The fields of every form that comes by a path, of which each takes its own."""
    forms = [(FORM.schema, _answer(path), ERROR)]
    if path != V2:
        forms.append((voyage.RERANK.schema, voyage.RERANK_ANSWER, voyage.ERROR))
    if path == BARE:
        forms.append((tei.RERANK.schema, tei.RERANK_ANSWER, tei.ERROR))
    schemas, answers, errors = map(list, zip(*forms, strict=True))
    properties = {name: found for schema in reversed(schemas) for name, found in schema["properties"].items()}
    needed = [{"required": each["required"]} for each in schemas]
    body = {**FORM.schema, "properties": properties, "required": ["query"], "anyOf": needed}
    return operation(body=body, answer={"anyOf": answers}, error={"anyOf": errors}, kinds=DENSE)


def _answer(path: str) -> Schema:
    results = list_of(
        object_of(
            optional=("document",),
            index=WHOLE,
            relevance_score=SCORE,
            document={"type": "object"},
        )
    )
    return answer_of(
        "rerank",
        results=results,
        usage=USAGE,
        meta=object_of(
            api_version=object_of(version=TEXT),
            billed_units=object_of(search_units=WHOLE),
            tokens=object_of(input_tokens=WHOLE, output_tokens=WHOLE),
        ),
        **({"data": results} if path == V1 else {}),
    )


def _routes(service: Service) -> list[ApiRoute]:
    async def rerank(request: Request) -> Response:
        translate = partial(_translate, exchange_of(request.scope))
        return await service.endpoint.answer(request, translate, Choice(DENSE, OutputKind.SCORE))

    summary = "Order documents by their relevance to a query"
    return [ApiRoute(path, rerank, summary=summary, described=_described(path)) for path in (V1, V2, BARE)]


API: Final = ClientApi("Rerank", _routes, error=write_error, place=40)
