"""Cohere's ``/v2/embed``: texts, images or mixed inputs, and vectors of several types at once."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import orjson

from tessera.errors import InvalidInput
from tessera.frontend.api.content import image_at, read_message
from tessera.frontend.api.formats import ResponseBody, Result, check_width, convert, finish
from tessera.frontend.api.request import EmbeddingsRequest, EmbedDtype, Input, RequestLimits, Scope
from tessera.frontend.api.schema import PARTS, STRING, WIDTH, Schema, body_of, list_of, object_of, values_of
from tessera.frontend.api.values import (
    INT32,
    Json,
    JsonObject,
    choice,
    expected,
    integer,
    non_empty_list,
    optional_positive,
    optional_string,
    request_body,
    string,
)
from tessera.models.base import Role, Truncate

INPUT_TYPES: Final[dict[str, Role | None]] = {
    "search_query": Role.QUERY,
    "search_document": Role.PASSAGE,
    "classification": None,
    "clustering": None,
    "image": None,
}
"""Uses that are no retrieval take no prefix, as elsewhere."""

TYPES: Final = {
    "float": EmbedDtype.FLOAT32,
    "base64": EmbedDtype.FLOAT32,
    "int8": EmbedDtype.INT8,
    "uint8": EmbedDtype.UINT8,
    "binary": EmbedDtype.BINARY,
    "ubinary": EmbedDtype.UBINARY,
}
_CONTENTS: Final = ("texts", "images", "inputs")
FIELDS: Final = (
    *("model", "input_type", *_CONTENTS, "max_tokens", "output_dimension", "embedding_types"),
    *("truncate", "priority"),
)

SCHEMA: Final[Schema] = body_of(
    "CohereEmbedRequest",
    (),
    model=STRING,
    input_type={"type": "string", "enum": list(INPUT_TYPES)},
    texts=list_of(STRING),
    images=list_of(STRING),
    inputs=list_of(object_of(("content",), content={"anyOf": [STRING, PARTS]})),
    max_tokens={"type": "integer", "minimum": 1, "maximum": INT32},
    output_dimension=WIDTH,
    embedding_types=list_of({"type": "string", "enum": list(TYPES)}),
    truncate=values_of(Truncate),
    priority={"type": "integer", "minimum": 0, "maximum": 999},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereRequest:
    """``types`` are the vector types to answer with; ``texts`` are echoed."""

    request: EmbeddingsRequest
    types: tuple[str, ...]
    texts: tuple[str, ...]


def parse_cohere(value: Json, limits: RequestLimits, models: Collection[str]) -> CohereRequest:
    body = request_body(value, FIELDS)
    scope = Scope(role=_role(body), limits=limits)
    inputs, texts = _inputs(body, scope)
    types = _types(body)
    priority = body.get("priority")
    packed = [TYPES[name] for name in types if TYPES[name] in (EmbedDtype.BINARY, EmbedDtype.UBINARY)]
    request = EmbeddingsRequest(
        inputs=inputs,
        model=optional_string(body, "model"),
        # The one type that asks something of the width, so that it is checked before the work.
        dtype=packed[0] if packed else EmbedDtype.FLOAT32,
        dimensions=optional_positive(body, "output_dimension"),
        dimensions_param="output_dimension",
        max_tokens=optional_positive(body, "max_tokens"),
        truncate=Truncate.END
        if body.get("truncate") is None
        else choice(body["truncate"], "truncate", Truncate),
        priority=0 if priority is None else integer(priority, "priority", low=0, high=999, what="0 to 999"),
    )
    return CohereRequest(request=request, types=types, texts=texts)


def write_cohere(parsed: CohereRequest, result: Result) -> ResponseBody:
    vectors, request = result.embedded.vectors, parsed.request
    width = check_width(vectors.shape[1], request.dimensions, request.dtype)
    rows = finish(vectors, width=width, normalize=True)
    usage = result.embedded.usage
    units: dict[str, Any] = {"input_tokens": usage.text_tokens}
    if images := sum(len(entry.images) for entry in request.inputs):
        units |= {"images": images, "image_tokens": usage.image_tokens}
    body: dict[str, Any] = {
        "id": result.request_id,
        "response_type": "embeddings_by_type",
        "embeddings": {
            name: [b64encode(row).decode("ascii") for row in rows]
            if name == "base64"
            else list(convert(rows, TYPES[name]))
            for name in parsed.types
        },
        "meta": {"api_version": {"version": "2"}, "billed_units": units},
    }
    if parsed.texts:
        body["texts"] = parsed.texts
    return ResponseBody(
        content=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY),
        media_type="application/json",
        headers={},
    )


def _role(body: JsonObject) -> Role | None:
    value = body.get("input_type")
    if value is None:
        return None
    if not isinstance(value, str) or value not in INPUT_TYPES:
        raise expected("input_type", f"one of {', '.join(INPUT_TYPES)}", value)
    return INPUT_TYPES[value]


def _inputs(body: JsonObject, scope: Scope) -> tuple[tuple[Input, ...], tuple[str, ...]]:
    given = [name for name in _CONTENTS if body.get(name) is not None]
    if len(given) != 1:
        raise InvalidInput(
            f"expected exactly one of {', '.join(_CONTENTS)}, found {', '.join(given) or 'none'}",
            param=given[1] if given else "texts",
        )
    (name,) = given
    values = non_empty_list(body[name], name, most=scope.limits.inputs)
    paths = [f"{name}[{index}]" for index in range(len(values))]
    if name == "texts":
        texts = tuple(string(value, path) for value, path in zip(values, paths, strict=True))
        return tuple(scope.fused(text, (), path) for text, path in zip(texts, paths, strict=True)), texts
    if name == "images":
        images = [image_at(value, path) for value, path in zip(values, paths, strict=True)]
        return tuple(scope.fused("", (image,), image.param) for image in images), ()
    read = (
        read_message(value, path, scope, owner=path, bare=True)
        for value, path in zip(values, paths, strict=True)
    )
    return tuple(read), ()


def _types(body: JsonObject) -> tuple[str, ...]:
    value = body.get("embedding_types")
    if value is None:
        return ("float",)
    names = non_empty_list(value, "embedding_types", most=16)
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in TYPES:
            raise expected(f"embedding_types[{index}]", f"one of {', '.join(TYPES)}", name)
    return tuple(dict.fromkeys(str(name) for name in names))
