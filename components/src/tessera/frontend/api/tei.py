"""Text-Embeddings-Inference's ``/embed``: text in, a bare list of vectors out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import orjson

from tessera.errors import EmptyInput, PayloadTooLarge
from tessera.frontend.api.content import read_tokens
from tessera.frontend.api.formats import ResponseBody, Result, check_width, finish
from tessera.frontend.api.request import EmbeddingsRequest, Input, RequestLimits, Scope, named_role
from tessera.frontend.api.schema import BOOLEAN, STRING, TOKENS, WIDTH, Schema, body_of, list_of
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
from tessera.models.base import Piece, Role, Truncate

PROMPTS: Final = {"query": Role.QUERY, "passage": Role.PASSAGE, "document": Role.PASSAGE}
DIRECTIONS: Final = {
    "Left": Truncate.START,
    "left": Truncate.START,
    "Right": Truncate.END,
    "right": Truncate.END,
}
TOKENIZE_FIELDS: Final = ("inputs", "add_special_tokens", "prompt_name")
FIELDS: Final = ("inputs", "truncate", "truncation_direction", "prompt_name", "normalize", "dimensions")

SCHEMA: Final[Schema] = body_of(
    "TeiEmbedRequest",
    ("inputs",),
    inputs={"anyOf": [STRING, TOKENS, list_of({"anyOf": [STRING, TOKENS]})]},
    truncate=BOOLEAN,
    truncation_direction={"type": "string", "enum": list(DIRECTIONS)},
    prompt_name={"type": "string", "enum": list(PROMPTS)},
    normalize=BOOLEAN,
    dimensions=WIDTH,
)


def parse_tei(value: Json, limits: RequestLimits, models: Collection[str]) -> EmbeddingsRequest:
    body = request_body(value, FIELDS)
    scope = Scope(role=named_role(body.get("prompt_name"), "prompt_name", PROMPTS), limits=limits)
    given = _given(body, limits)
    if isinstance(given, list) and isinstance(given[0], str | list):
        values = given
        inputs = tuple(_read(entry, f"inputs[{index}]", scope) for index, entry in enumerate(values))
    else:
        inputs = (_read(given, "inputs", scope),)
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


def parse_tei_tokenize(value: Json, limits: RequestLimits) -> tuple[tuple[tuple[str, str], ...], Role, bool]:
    """TEI's ``/tokenize``: texts with their paths, the role, and whether special tokens are wanted."""
    body = request_body(value, TOKENIZE_FIELDS)
    role = named_role(body.get("prompt_name"), "prompt_name", PROMPTS)
    scope = Scope(role=role, limits=limits)
    given = _given(body, limits)
    values = given if isinstance(given, list) else [given]
    paths = [f"inputs[{index}]" if isinstance(given, list) else "inputs" for index in range(len(values))]
    texts = tuple(
        (scope.text(string(value, path), path), path) for value, path in zip(values, paths, strict=True)
    )
    return texts, role or Role.NONE, optional_boolean(body, "add_special_tokens", default=True)


def write_tei_tokens(texts: Sequence[Sequence[Piece]], *, special: bool) -> list[list[dict[str, Json]]]:
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
    vectors = result.embedded.vectors
    width = check_width(vectors.shape[1], request.dimensions, request.dtype)
    rows = finish(vectors, width=width, normalize=request.normalize)
    return ResponseBody(
        content=orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY),
        media_type="application/json",
        headers={"x-compute-tokens": str(result.embedded.usage.text_tokens)},
    )


def _read(value: Json, param: str, scope: Scope) -> Input:
    if isinstance(value, str):
        return scope.fused(value, (), param)
    if isinstance(value, list) and value:
        return read_tokens(value, param, scope)
    raise expected(param, "text or token ids", value)


def _truncate(value: Json, direction: Json) -> Truncate:
    chosen = Truncate.END
    if direction is not None:
        if not isinstance(direction, str) or direction not in DIRECTIONS:
            raise expected("truncation_direction", "Left or Right", direction)
        chosen = DIRECTIONS[direction]
    return chosen if value is not None and boolean(value, "truncate") else Truncate.NONE
