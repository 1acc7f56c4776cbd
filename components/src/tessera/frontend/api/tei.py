"""Text-Embeddings-Inference's ``/embed`` and ``/embed_all``: text in, a list of vectors or matrices out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tessera.errors import EmptyInput, PayloadTooLarge
from tessera.frontend.api.content import InputBuilder, named_role, read_tokens
from tessera.frontend.api.endpoint import TOKEN_VECTORS, VECTORS, Served, Translated
from tessera.frontend.api.formats import ResponseBody, finish, json_matrix, matrices
from tessera.frontend.api.openai import MATRIX, finished
from tessera.frontend.api.schema import (
    BOOLEAN,
    INSTRUCTION,
    NUMBERS,
    STRING,
    TOKENS,
    WIDTH,
    Schema,
    body_of,
    list_of,
    object_of,
    operation,
)
from tessera.frontend.api.values import (
    Json,
    JsonObject,
    boolean,
    expected,
    optional_boolean,
    optional_positive,
    request_body,
    string,
)
from tessera.frontend.http.errors import Failure
from tessera.frontend.request import EmbeddingsRequest, Input, RequestLimits
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Result, check_width
from tessera.models.base import Piece, Role, Truncate

PROMPTS: Final = {"query": Role.QUERY, "passage": Role.PASSAGE, "document": Role.PASSAGE}
DIRECTIONS: Final = {
    "Left": Truncate.START,
    "left": Truncate.START,
    "Right": Truncate.END,
    "right": Truncate.END,
}
TOKENIZE_FIELDS: Final = ("inputs", "add_special_tokens", "prompt_name", "instruction")
FIELDS: Final = (
    *("inputs", "truncate", "truncation_direction", "prompt_name", "instruction"),
    *("normalize", "dimensions"),
)

# A row for each token has the model's own width.
ALL_FIELDS: Final = tuple(name for name in FIELDS if name != "dimensions")

SCHEMA: Final[Schema] = body_of(
    "TeiEmbedRequest",
    ("inputs",),
    inputs={"anyOf": [STRING, TOKENS, list_of({"anyOf": [STRING, TOKENS]})]},
    truncate=BOOLEAN,
    truncation_direction={"type": "string", "enum": list(DIRECTIONS)},
    prompt_name={"type": "string", "enum": list(PROMPTS)},
    instruction=INSTRUCTION,
    normalize=BOOLEAN,
    dimensions=WIDTH,
)


ALL_SCHEMA: Final[Schema] = {
    **SCHEMA,
    "title": "TeiEmbedAllRequest",
    "properties": {name: SCHEMA["properties"][name] for name in ALL_FIELDS},
}


def parse_tei(value: Json, limits: RequestLimits, fields: Collection[str] = FIELDS) -> EmbeddingsRequest:
    body = request_body(value, fields)
    builder = InputBuilder.of(body, named_role(body.get("prompt_name"), "prompt_name", PROMPTS), limits)
    given = _given(body, limits)
    if isinstance(given, list) and isinstance(given[0], str | list):
        values = given
        inputs = tuple(_read(entry, f"inputs[{index}]", builder) for index, entry in enumerate(values))
    else:
        inputs = (_read(given, "inputs", builder),)
    return EmbeddingsRequest(
        inputs=inputs,
        dimensions=optional_positive(body, "dimensions"),
        normalize=optional_boolean(body, "normalize", default=True),
        truncate=_truncate(body.get("truncate"), body.get("truncation_direction")),
    )


def _given(body: JsonObject, limits: RequestLimits) -> Json:
    """TEI tells an empty batch and one that is too large from other malformed requests."""
    given = body.get("inputs")
    if given == []:
        raise EmptyInput("`inputs` cannot be empty", param="inputs")
    if isinstance(given, list) and isinstance(given[0], str | list) and len(given) > limits.inputs:
        raise PayloadTooLarge(
            f"batch size {len(given)} > maximum allowed batch size {limits.inputs}", param="inputs"
        )
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """TEI's ``/tokenize``: texts with their paths, and whether special tokens are wanted."""

    texts: tuple[tuple[str, str], ...]
    role: Role
    instruction: str | None
    special: bool


def parse_tokenize(value: Json, limits: RequestLimits) -> TokenizeRequest:
    body = request_body(value, TOKENIZE_FIELDS)
    role = named_role(body.get("prompt_name"), "prompt_name", PROMPTS)
    builder = InputBuilder.of(body, role, limits)
    given = _given(body, limits)
    values = given if isinstance(given, list) else [given]
    paths = [f"inputs[{index}]" if isinstance(given, list) else "inputs" for index in range(len(values))]
    texts = tuple(
        (builder.text(string(value, path), path), path) for value, path in zip(values, paths, strict=True)
    )
    return TokenizeRequest(
        texts=texts,
        role=role or Role.NONE,
        instruction=builder.instruction,
        special=optional_boolean(body, "add_special_tokens", default=True),
    )


def write_tokens(texts: Sequence[Sequence[Piece]], *, special: bool) -> list[list[dict[str, Json]]]:
    return [
        [
            {
                "id": piece.token,
                "text": piece.text,
                "special": piece.start is None,
                "start": piece.start,
                "stop": piece.stop,
            }
            for piece in pieces
            if special or piece.start is not None
        ]
        for pieces in texts
    ]


def write_tei(request: EmbeddingsRequest, result: Result) -> ResponseBody:
    vectors = result.rows
    width = check_width(vectors.shape[1], request.dimensions, request.dtype)
    rows = finish(vectors, width=width, normalize=request.normalize)
    return ResponseBody.of_json(rows, {"x-compute-tokens": str(result.usage.text_tokens)})


def write_all(request: EmbeddingsRequest, served: Served, result: Result) -> ResponseBody:
    values = finished(result.rows, request, served.output)
    rows = [json_matrix(matrix) for matrix in matrices(values, result.bounds)]
    return ResponseBody.of_json(rows, {"x-compute-tokens": str(result.usage.text_tokens)})


def _read(value: Json, param: str, builder: InputBuilder) -> Input:
    if isinstance(value, str):
        return builder.build((value,), param)
    if isinstance(value, list) and value:
        return read_tokens(value, param, builder)
    raise expected(param, "text or token ids", value)


def _truncate(value: Json, direction: Json) -> Truncate:
    chosen = Truncate.END
    if direction is not None:
        if not isinstance(direction, str) or direction not in DIRECTIONS:
            raise expected("truncation_direction", "Left or Right", direction)
        chosen = DIRECTIONS[direction]
    return chosen if value is not None and boolean(value, "truncate") else Truncate.NONE


def _translate(body: Json, served: Served) -> Translated:
    request = parse_tei(body, served.limits)
    return Translated(
        request=request,
        write=partial(write_tei, request),
        forms=((request.dtype, request.encoding_format),),
    )


def _translate_all(body: Json, served: Served) -> Translated:
    request = parse_tei(body, served.limits, ALL_FIELDS)
    return Translated(
        request=request,
        write=partial(write_all, request, served),
        forms=((request.dtype, request.encoding_format),),
    )


_ERROR_TYPES: Final = {
    401: "Unauthorized",
    413: "Validation",
    429: "Overloaded",
    503: "Unhealthy",
    504: "Overloaded",
}


def write_error(failure: Failure) -> tuple[int, JsonObject]:
    status, error = failure.status, failure.error
    kind = "Validation" if status < 500 else "Backend"
    if error["code"] == EmptyInput.code:
        kind = "Empty"
    elif status == 400:
        # A malformed request is a 422 here.
        status = 422
    return status, {"error": error["message"], "error_type": _ERROR_TYPES.get(status, kind)}


ERROR: Final = object_of(("error", "error_type"), error={"type": "string"}, error_type={"type": "string"})


def _routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["Text-Embeddings-Inference"])
    described = operation(body=SCHEMA, answer=list_of(NUMBERS), error=ERROR, kinds=VECTORS)

    @router.post("/embed", openapi_extra=described, summary="Embed text")
    async def embed(request: Request) -> Response:
        return await service.endpoint.embed(request, _translate)

    described_all = operation(body=ALL_SCHEMA, answer=list_of(MATRIX), error=ERROR, kinds=TOKEN_VECTORS)

    @router.post("/embed_all", openapi_extra=described_all, summary="Vectors of each token of a text")
    async def embed_all(request: Request) -> Response:
        return await service.endpoint.embed(request, _translate_all, kinds=TOKEN_VECTORS)

    return router


API: Final = ClientApi(routes=_routes, error=write_error)
