"""Voyage's ``/v1/multimodalembeddings``, each input a list of content parts, and its ``/v1/rerank``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tessera.frontend.api.content import InputBuilder, named_role, read_message
from tessera.frontend.api.endpoint import VECTORS, Translated, TranslatedScores
from tessera.frontend.api.formats import ResponseBody, base64_rows, convert, finish, numbers
from tessera.frontend.api.schema import (
    BOOLEAN,
    INSTRUCTION,
    NUMBERS,
    PARTS,
    STRING,
    WHOLE,
    WIDTH,
    Schema,
    body_of,
    list_of,
    object_of,
    operation,
)
from tessera.frontend.api.scores import (
    DOCUMENTS_SCHEMA,
    QUERY_SCHEMA,
    SCORE,
    document_list,
    query_builder,
    ranked,
    read_documents,
    read_item,
)
from tessera.frontend.api.values import (
    Json,
    JsonObject,
    choice,
    expected,
    non_empty_list,
    optional_boolean,
    optional_positive,
    optional_string,
    request_body,
)
from tessera.frontend.http.errors import Failure
from tessera.frontend.request import (
    EmbeddingsRequest,
    EmbedDtype,
    EncodingFormat,
    RequestLimits,
    ScoreRequest,
)
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Result, Scores
from tessera.frontend.serving.served import Served
from tessera.models.base import Role, Truncate

INPUT_TYPES: Final = {"query": Role.QUERY, "document": Role.PASSAGE}
DTYPES: Final = ("float", "int8", "uint8", "binary", "ubinary")
FIELDS: Final = (
    *("inputs", "model", "input_type", "truncation", "output_encoding", "output_dimension"),
    *("output_dtype", "encoding_format", "instruction"),
)
RERANK_ONLY: Final = ("top_k", "truncation")
"""What nobody else's requests for a rerank have; Voyage's package always sends both."""
RERANK_FIELDS: Final = ("query", "documents", "instruction", "model", "return_documents", *RERANK_ONLY)

SCHEMA: Final[Schema] = body_of(
    "VoyageMultimodalRequest",
    ("inputs",),
    inputs=list_of(object_of(("content",), content=PARTS, instruction=INSTRUCTION)),
    instruction=INSTRUCTION,
    model=STRING,
    input_type={"type": "string", "enum": list(INPUT_TYPES)},
    truncation=BOOLEAN,
    output_encoding={"type": "string", "enum": ["base64"]},
    output_dimension=WIDTH,
    output_dtype={"type": "string", "enum": list(DTYPES)},
    encoding_format={"type": "string", "enum": ["base64"]},
)


def parse_voyage(value: Json, limits: RequestLimits) -> EmbeddingsRequest:
    body = request_body(value, FIELDS)
    builder = InputBuilder.of(body, named_role(body.get("input_type"), "input_type", INPUT_TYPES), limits)
    inputs = []
    for index, entry in enumerate(non_empty_list(body.get("inputs"), "inputs", most=limits.inputs)):
        path = f"inputs[{index}]"
        inputs.append(read_message(entry, path, builder, owner=path, bare=True))
    truncated = optional_boolean(body, "truncation", default=True)
    dtype = body.get("output_dtype")
    return EmbeddingsRequest(
        inputs=tuple(inputs),
        model=optional_string(body, "model"),
        encoding_format=_encoding(body),
        dtype=EmbedDtype.FLOAT32 if dtype is None else _dtype(dtype),
        dimensions=optional_positive(body, "output_dimension"),
        dimensions_param="output_dimension",
        truncate=Truncate.END if truncated else Truncate.NONE,
    )


def write_voyage(request: EmbeddingsRequest, model: str, result: Result) -> ResponseBody:
    vectors, usage = result.rows.values, result.usage
    width = request.dimensions or vectors.shape[1]
    values = convert(finish(vectors, width=width, normalize=True), request.dtype)
    rows: list[Any] = (
        base64_rows(values)
        if request.encoding_format is EncodingFormat.BASE64
        else list(numbers(values, request.dtype))
    )
    body = {
        "object": "list",
        "data": [{"object": "embedding", "embedding": row, "index": index} for index, row in enumerate(rows)],
        "model": model,
        "usage": {
            "text_tokens": usage.text_tokens,
            "image_pixels": result.image_pixels,
            "video_pixels": 0,
            "total_tokens": usage.text_tokens + usage.image_tokens,
        },
    }
    return ResponseBody.of_json(body)


def _encoding(body: JsonObject) -> EncodingFormat:
    """The documentation says ``output_encoding``, Voyage's own package sends ``encoding_format``."""
    given = [
        (name, body[name]) for name in ("output_encoding", "encoding_format") if body.get(name) is not None
    ]
    for name, value in given:
        if value != "base64":
            raise expected(name, "base64 or null", value)
    return EncodingFormat.BASE64 if given else EncodingFormat.FLOAT


def _dtype(value: Json) -> EmbedDtype:
    if value not in DTYPES:
        raise expected("output_dtype", f"one of {', '.join(DTYPES)}", value)
    return choice(value, "output_dtype", EmbedDtype, {"float": EmbedDtype.FLOAT32})


def _translate(body: Json, served: Served) -> Translated:
    request = parse_voyage(body, served.limits)
    return Translated(
        request=request,
        write=partial(write_voyage, request, served.model),
    )


def parse_rerank(value: Json, served: Served) -> TranslatedScores:
    body = request_body(value, RERANK_FIELDS)
    query = read_item(body.get("query"), "query", query_builder(body, served.limits))
    given = document_list(body, "documents", served.limits)
    truncated = optional_boolean(body, "truncation", default=True)
    request = ScoreRequest(
        queries=(query,),
        documents=read_documents(given, "documents", served.limits),
        model=optional_string(body, "model"),
        truncate=Truncate.END if truncated else Truncate.NONE,
    )
    returned = given if optional_boolean(body, "return_documents", default=False) else ()
    write = partial(write_rerank, served.model, returned, most=optional_positive(body, "top_k"))
    return TranslatedScores(request=request, write=write, copies=1 if returned else 0)


def write_rerank(model: str, documents: Sequence[Json], scores: Scores, *, most: int | None) -> ResponseBody:
    """``documents`` are those that come back, as the client sent them."""
    data: list[dict[str, Any]] = [
        {"index": index, "relevance_score": score} for index, score in ranked(scores, most=most)
    ]
    if documents:
        for row in data:
            row["document"] = documents[row["index"]]
    usage = {"total_tokens": scores.usage.total_tokens}
    return ResponseBody.of_json({"object": "list", "data": data, "model": model, "usage": usage})


def write_error(failure: Failure) -> tuple[int, JsonObject]:
    return failure.status, {"detail": failure.error["message"]}


_ANSWER: Final = object_of(
    ("object", "data", "model", "usage"),
    object={"const": "list"},
    data=list_of(
        object_of(
            ("object", "embedding", "index"),
            object={"const": "embedding"},
            embedding={"anyOf": [NUMBERS, {"type": "string"}]},
            index=WHOLE,
        )
    ),
    model={"type": "string"},
    usage=object_of(
        ("text_tokens", "image_pixels", "video_pixels", "total_tokens"),
        text_tokens=WHOLE,
        image_pixels=WHOLE,
        video_pixels=WHOLE,
        total_tokens=WHOLE,
    ),
)
ERROR: Final = object_of(("detail",), detail={"type": "string"})

RERANK_SCHEMA: Final[Schema] = body_of(
    "VoyageRerankRequest",
    ("query", "documents"),
    query=QUERY_SCHEMA,
    documents=DOCUMENTS_SCHEMA,
    instruction=INSTRUCTION,
    model=STRING,
    top_k={**WIDTH, "description": "The most results, in Voyage's form."},
    truncation={**BOOLEAN, "description": "Whether long documents are cut, in Voyage's form."},
    return_documents=BOOLEAN,
)
RERANK_ANSWER: Final = object_of(
    ("object", "data", "model", "usage"),
    object={"const": "list"},
    data=list_of(
        object_of(
            ("index", "relevance_score"),
            index=WHOLE,
            relevance_score=SCORE,
            document={"type": ["string", "object"]},
        )
    ),
    model={"type": "string"},
    usage=object_of(("total_tokens",), total_tokens=WHOLE),
)


def _routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["Voyage"])
    described = operation(body=SCHEMA, answer=_ANSWER, error=ERROR, kinds=VECTORS)

    @router.post("/v1/multimodalembeddings", openapi_extra=described, summary="Embed content parts")
    async def embed(request: Request) -> Response:
        return await service.endpoint.answer(request, _translate)

    return router


API: Final = ClientApi(routes=_routes, error=write_error)
