"""Voyage's ``/v1/multimodalembeddings``, ``/v1/contextualizedembeddings`` and ``/v1/rerank``.

An input of the first is a list of content parts, one of the second a document, a list of its chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tessera.errors import InvalidInput
from tessera.frontend.api.body import (
    Also,
    CutOrError,
    Flag,
    Form,
    Instruction,
    ModelName,
    Positive,
    Width,
    about,
    named,
    unread,
)
from tessera.frontend.api.content import InputBuilder, read_message
from tessera.frontend.api.documents import check_chunks, document_of
from tessera.frontend.api.endpoint import Translated, TranslatedScores
from tessera.frontend.api.formats import Long, ResponseBody, Values, base64_rows
from tessera.frontend.api.openai import finished
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import (
    INSTRUCTION,
    NUMBERS,
    PARTS,
    TEXT,
    WHOLE,
    Schema,
    list_of,
    object_of,
)
from tessera.frontend.api.values import Json, JsonObject, is_list, non_empty_list, string
from tessera.frontend.http.errors import Failure
from tessera.frontend.request import (
    EmbeddingsRequest,
    EmbedDtype,
    EncodingFormat,
    Input,
    RequestLimits,
    ScoreRequest,
)
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Result, Scores
from tessera.frontend.serving.served import Served
from tessera.models.base import CHUNKS, Role, Truncate
from tessera_apis.scores import (
    DOCUMENTS_EXAMPLE,
    DOCUMENTS_SCHEMA,
    QUERY_EXAMPLE,
    QUERY_SCHEMA,
    SCORE,
    document_list,
    query_builder,
    ranking,
    read_documents,
    read_item,
)

INPUT_TYPES: Final = {"query": Role.QUERY, "document": Role.PASSAGE}
DTYPES: Final = {
    "float": EmbedDtype.FLOAT32,
    **{
        kind.value: kind
        for kind in (EmbedDtype.INT8, EmbedDtype.UINT8, EmbedDtype.BINARY, EmbedDtype.UBINARY)
    },
}
RERANK_ONLY: Final = ("top_k", "truncation")
"""What nobody else's requests for a rerank have; Voyage's package always sends both."""
_INPUT: Final = object_of(optional=("instruction",), content=PARTS, instruction=INSTRUCTION)
_InputType = Annotated[
    Role | None, named(INPUT_TYPES), about("Whether the inputs are queries or documents to be found.")
]
_Encoding = Annotated[
    EncodingFormat,
    named({"base64": EncodingFormat.BASE64}, "base64 or null"),
    about("How vectors are written; null: as numbers."),
]
_Dtype = Annotated[EmbedDtype, named(DTYPES), about("The type of a vector's values.")]


class VoyageMultimodalRequest(msgspec.Struct, kw_only=True):
    """Declares the body of ``/v1/multimodalembeddings``.

    The documentation says ``output_encoding``, Voyage's own package sends ``encoding_format``.
    """

    inputs: Annotated[
        Json,
        unread(list_of(_INPUT)),
        about(
            "Inputs of texts and images together, a vector for each.",
            [{"content": [{"type": "text", "text": "a yellow heart"}]}],
        ),
    ]
    instruction: Instruction = None
    model: ModelName = None
    input_type: _InputType = None
    truncation: CutOrError = True
    output_encoding: Annotated[_Encoding, Also("encoding_format")] = EncodingFormat.FLOAT
    output_dimension: Width = None
    output_dtype: _Dtype = EmbedDtype.FLOAT32


class VoyageContextualizedRequest(msgspec.Struct, kw_only=True):
    """Declares the body of ``/v1/contextualizedembeddings``."""

    inputs: Annotated[
        Json,
        unread(list_of(list_of(TEXT))),
        about(
            "Documents, each a list of its chunks in their order; a vector for each chunk. A query is a "
            "document of one chunk.",
            [["Berlin is the capital of Germany.", " It has 3.85 million inhabitants."]],
        ),
    ]
    model: ModelName = None
    input_type: _InputType = None
    encoding_format: _Encoding = EncodingFormat.FLOAT
    output_dimension: Width = None
    output_dtype: _Dtype = EmbedDtype.FLOAT32


class VoyageRerankRequest(msgspec.Struct, kw_only=True):
    """Declares Voyage's body of ``/v1/rerank``."""

    query: Annotated[Json, unread(QUERY_SCHEMA), about("What is looked for.", QUERY_EXAMPLE)]
    documents: Annotated[Json, unread(DOCUMENTS_SCHEMA), about("What is put in order.", DOCUMENTS_EXAMPLE)]
    instruction: Instruction = None
    model: ModelName = None
    top_k: Annotated[Positive, about("The most results, in Voyage's form.", 3)] = None
    truncation: Annotated[Flag, Meta(description="Whether long documents are cut, in Voyage's form.")] = True
    return_documents: Annotated[Flag, about("Whether each result has its document.")] = False


EMBED: Final = Form(VoyageMultimodalRequest)
CONTEXTUALIZED: Final = Form(
    VoyageContextualizedRequest,
    # Texts are cut into chunks by the client.
    inert={"enable_auto_chunking": (False,), "chunk_size": (), "chunk_overlap": ()},
)
RERANK: Final = Form(VoyageRerankRequest)


def _translate(value: Json, served: Served) -> Translated:
    body, limits = EMBED.read(value), served.limits
    builder = InputBuilder.of(body.instruction, body.input_type, limits)
    inputs = []
    for index, entry in enumerate(non_empty_list(body.inputs, "inputs", most=limits.inputs)):
        path = f"inputs[{index}]"
        inputs.append(read_message(entry, path, builder, owner=path, bare=True))
    request = EmbeddingsRequest(
        inputs=tuple(inputs),
        model=body.model,
        encoding_format=body.output_encoding,
        dtype=body.output_dtype,
        dimensions=body.output_dimension,
        dimensions_param="output_dimension",
        truncate=Truncate.DECLARED if body.truncation else Truncate.NONE,
    )
    return Translated(request=request, write=partial(write_voyage, request, served))


def write_voyage(request: EmbeddingsRequest, served: Served, result: Result) -> ResponseBody:
    usage: JsonObject = {
        "text_tokens": result.usage.text_tokens,
        "image_pixels": result.image_pixels,
        "video_pixels": 0,
        "total_tokens": result.usage.total_tokens,
    }
    return _list(_embeddings(_rows(request, served, result)), served.model, usage)


def _rows(request: EmbeddingsRequest, served: Served, result: Result) -> Values | list[str | Long]:
    values = finished(result.rows.values, request, served.output)
    return base64_rows(values) if request.encoding_format is EncodingFormat.BASE64 else values


def _embeddings(rows: Values | list[str | Long]) -> list[JsonObject]:
    return [{"object": "embedding", "embedding": row, "index": index} for index, row in enumerate(rows)]


def _list(data: Sequence[JsonObject], model: str, usage: JsonObject) -> ResponseBody:
    return ResponseBody.of_json({"object": "list", "data": data, "model": model, "usage": usage})


def _translate_contextualized(value: Json, served: Served) -> Translated:
    body, limits = CONTEXTUALIZED.read(value), served.limits
    check_chunks(served, "model")
    builder = InputBuilder.of(None, body.input_type, limits)
    documents: list[Input] = []
    left = limits.inputs
    for index, entry in enumerate(non_empty_list(body.inputs, "inputs", most=limits.inputs)):
        path = f"inputs[{index}]"
        if not left:
            raise _too_many(path, limits)
        chunks = _chunks(entry, path, builder, most=left)
        left -= len(chunks)
        documents.append(document_of(chunks, path, limits))
    request = EmbeddingsRequest(
        inputs=tuple(documents),
        outputs=(CHUNKS,),
        model=body.model,
        encoding_format=body.encoding_format,
        dtype=body.output_dtype,
        dtype_param="output_dtype",
        dimensions=body.output_dimension,
        dimensions_param="output_dimension",
    )
    return Translated(request=request, write=partial(write_contextualized, request, served))


def _chunks(value: Json, param: str, builder: InputBuilder, *, most: int) -> list[Input]:
    if is_list(value) and len(value) > most:
        raise _too_many(param, builder.limits)
    paths = [
        (chunk, f"{param}[{place}]") for place, chunk in enumerate(non_empty_list(value, param, most=most))
    ]
    return [builder.build([builder.text(string(chunk, path), path)], path) for chunk, path in paths]


def _too_many(param: str, limits: RequestLimits) -> InvalidInput:
    return InvalidInput.at(param, f"a request may have {limits.inputs} chunks, and here are more")


def write_contextualized(request: EmbeddingsRequest, served: Served, result: Result) -> ResponseBody:
    """Write a list for each document, with a vector for each of its chunks."""
    rows, bounds = _rows(request, served, result), pairwise(result.rows.bounds.tolist())
    data: list[JsonObject] = [
        {"object": "list", "index": index, "data": _embeddings(rows[first:last])}
        for index, (first, last) in enumerate(bounds)
    ]
    return _list(data, served.model, {"total_tokens": result.usage.total_tokens})


def parse_rerank(value: Json, served: Served) -> TranslatedScores:
    body, limits = RERANK.read(value), served.limits
    query = read_item(body.query, "query", query_builder(body.instruction, limits))
    given = document_list(body.documents, "documents", limits)
    request = ScoreRequest(
        queries=(query,),
        documents=read_documents(given, "documents", limits),
        model=body.model,
        truncate=Truncate.DECLARED if body.truncation else Truncate.NONE,
    )
    returned = given if body.return_documents else ()
    write = partial(write_rerank, served.model, returned, most=body.top_k)
    return TranslatedScores(request=request, write=write, copies=1 if returned else 0)


def write_rerank(model: str, documents: Sequence[Json], scores: Scores, *, most: int | None) -> ResponseBody:
    """``documents`` are those that come back, as the client sent them."""
    data = ranking(scores, "relevance_score", most=most, document=documents)
    return _list(data, model, {"total_tokens": scores.usage.total_tokens})


def write_error(failure: Failure) -> tuple[int, JsonObject]:
    return failure.status, {"detail": failure.error["message"]}


def _list_of(entry: Schema, **usage: Schema) -> Schema:
    return object_of(
        object={"const": "list"},
        data=list_of(entry),
        model=TEXT,
        usage=object_of(**usage, total_tokens=WHOLE),
    )


_EMBEDDING: Final = object_of(
    object={"const": "embedding"}, embedding={"anyOf": [NUMBERS, TEXT]}, index=WHOLE
)
_ANSWER: Final = _list_of(_EMBEDDING, text_tokens=WHOLE, image_pixels=WHOLE, video_pixels=WHOLE)
_CONTEXTUALIZED_ANSWER: Final = _list_of(
    object_of(object={"const": "list"}, index=WHOLE, data=list_of(_EMBEDDING))
)
RERANK_ANSWER: Final = _list_of(
    object_of(
        optional=("document",), index=WHOLE, relevance_score=SCORE, document={"type": ["string", "object"]}
    )
)
ERROR: Final = object_of(detail=TEXT)


def _routes(service: Service) -> list[ApiRoute]:
    return [
        service.endpoint.route(
            "/v1/multimodalembeddings",
            _translate,
            name="embed",
            summary="Embed content parts",
            body=EMBED.schema,
            answer=_ANSWER,
            error=ERROR,
        ),
        service.endpoint.route(
            "/v1/contextualizedembeddings",
            _translate_contextualized,
            name="contextualized_embed",
            summary="Embed the chunks of documents",
            body=CONTEXTUALIZED.schema,
            answer=_CONTEXTUALIZED_ANSWER,
            error=ERROR,
        ),
    ]


API: Final = ClientApi("Voyage", _routes, error=write_error, place=20)
