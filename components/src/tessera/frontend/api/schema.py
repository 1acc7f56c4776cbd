"""Pieces of JSON Schema and of OpenAPI that routes are described with."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from tessera.frontend.api.content import MESSAGE_ROLES
from tessera.frontend.http.errors import MEANINGS
from tessera.frontend.media import MAX_SIDE
from tessera.frontend.request import EmbedDtype
from tessera.models.base import OutputKind

Schema = dict[str, Any]

STRING: Final[Schema] = {"type": "string", "minLength": 1}
BOOLEAN: Final[Schema] = {"type": "boolean"}
INSTRUCTION: Final[Schema] = {
    **STRING,
    "description": "What the vectors are to be good for, in a sentence, for models that take that.",
}
UUID: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 256}


def values_of(kind: type[StrEnum], *more: str) -> Schema:
    return {"type": "string", "enum": [*(member.value for member in kind), *more]}


def object_of(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def part_of(kind: str, **properties: Schema) -> Schema:
    return object_of(("type", *properties), type={"type": "string", "enum": [kind]}, **properties)


_SIDES: Final[Schema] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1, "maximum": MAX_SIDE - 1},
    "minItems": 3,
    "maxItems": 3,
}
EMBEDS: Final = object_of(
    ("image_embeds",),
    image_embeds=STRING,
    image_grid_thw={"anyOf": [_SIDES, {"type": "array", "items": _SIDES, "minItems": 1, "maxItems": 1}]},
)


def image_part(kind: str, key: str) -> Schema:
    part = part_of(kind, **{key: STRING})
    part["properties"]["uuid"] = UUID
    # With a uuid the payload may be null, and rows may come with their grid.
    other = EMBEDS if kind == "image_embeds" else {"type": "null"}
    part["properties"][key] = {"anyOf": [STRING, other]}
    return part


def url_part(kind: str) -> Schema:
    part = image_part(kind, "image_url")
    detail: Schema = {"type": "string", "enum": ["auto"]}
    part["properties"]["detail"] = detail
    part["properties"]["image_url"] = {
        "anyOf": [STRING, object_of(("url",), url=STRING, detail=detail), {"type": "null"}]
    }
    return part


PART: Final[Schema] = {
    "anyOf": [
        *(part_of(kind, text=STRING) for kind in ("text", "input_text")),
        *(url_part(kind) for kind in ("image_url", "input_image")),
        *(image_part(kind, kind) for kind in ("image_base64", "image", "image_embeds")),
    ]
}
PARTS: Final = list_of(PART)
CONTENT: Final[Schema] = {"anyOf": [STRING, PARTS]}
MESSAGE: Final = object_of(
    ("role", "content"),
    role={"type": "string", "enum": list(MESSAGE_ROLES)},
    content=CONTENT,
    instruction=INSTRUCTION,
)
CONVERSATION: Final[Schema] = {
    **list_of(MESSAGE),
    "maxItems": 3,
    "description": "One message; before it there may be a system message with the instruction, and after it "
    "an empty one of the assistant.",
}
TOKENS: Final = list_of({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})
FUSED: Final = {
    "anyOf": [
        object_of((name,), text=STRING, image=STRING, instruction=INSTRUCTION) for name in ("text", "image")
    ]
}
ITEM: Final[Schema] = {
    "anyOf": [
        STRING,
        TOKENS,
        PARTS,
        CONVERSATION,
        MESSAGE,
        FUSED,
        object_of(("content",), content=CONTENT, instruction=INSTRUCTION),
    ]
}
DTYPES: Final = values_of(EmbedDtype, "float")
WIDTH: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}


def inert_schemas(inert: Mapping[str, tuple[object, ...]]) -> dict[str, Schema]:
    """Fields of other servers, with the values besides null that change nothing."""
    return {
        name: {"enum": [*values, None], "description": "Accepted for compatibility; has no effect."}
        for name, values in inert.items()
    }


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def request_body(schema: Schema) -> Schema:
    """What a route takes as ``openapi_extra`` to describe its JSON body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_of(title: str, required: tuple[str, ...], **properties: Schema) -> Schema:
    """A body whose properties may all be null, which counts as absent."""
    return {
        **object_of(required, **{name: nullable(schema) for name, schema in properties.items()}),
        "title": title,
    }


_TEXT: Final[Schema] = {"type": "string"}
_MAYBE_TEXT: Final[Schema] = {"type": ["string", "null"]}

ERROR_OBJECT: Final = object_of(
    ("message", "type", "param", "code"), message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_TEXT
)
OPENAI_ERROR: Final = object_of(("error",), error=ERROR_OBJECT)

NUMBERS: Final[Schema] = {"type": "array", "items": {"type": "number"}}
WHOLE: Final[Schema] = {"type": "integer", "minimum": 0}


DESCRIBED: Final[dict[str, Schema]] = {
    "family": _TEXT,
    "output": object_of(
        ("kind", "width", "dimensions"),
        kind={"type": "string", "enum": [kind.value for kind in OutputKind]},
        width=WHOLE,
        dimensions={
            "type": "array",
            "items": {"type": "array", "items": WHOLE, "minItems": 2, "maxItems": 2},
            "description": "The widths that requests may ask for: ranges of the least and the most.",
        },
    ),
    "images": {"type": "boolean", "description": "Whether the model takes images."},
    "task": {**_TEXT, "description": "What it does, as `/pooling` calls that."},
    "routes": {
        "type": "array",
        "items": _TEXT,
        "description": "The routes that answer what comes out of it; others are 404 with the reason.",
    },
    "source": {
        "description": "What of a hub is served, null for a directory. `cached` says why a copy from before "
        "is used though the hub has not confirmed it.",
        "anyOf": [
            object_of(
                ("repository", "revision", "commit", "cached"),
                repository=_TEXT,
                revision=_TEXT,
                commit=_TEXT,
                cached=_MAYBE_TEXT,
            ),
            {"type": "null"},
        ],
    },
}
"""What ``service.described`` says of a model."""


OUTPUTS: Final = "x-output-kinds"
"""Of a route that answers what comes out of the model: the outputs of the models that it answers for."""


def operation(
    *,
    body: Schema,
    answer: Schema,
    error: Schema,
    kinds: frozenset[OutputKind] | None = None,
    **others: Schema,
) -> dict[str, Any]:
    """``openapi_extra`` for a POST route; ``others`` are further media types of the answer.

    ``kinds`` are those that the route's ``Endpoint.answer`` or ``score`` is given.
    """
    content = {"application/json": {"schema": answer}}
    content |= {
        name.replace("__", "/").replace("_", "-"): {"schema": value} for name, value in others.items()
    }
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status, meaning in MEANINGS.items():
        responses[str(status)] = {
            "description": meaning,
            "content": {"application/json": {"schema": error}},
        }
    outputs = {} if kinds is None else {OUTPUTS: [kind.value for kind in OutputKind if kind in kinds]}
    return request_body(body) | {"responses": responses} | outputs


def answers(answer: Schema, *statuses: int) -> dict[str, Any]:
    """``openapi_extra`` for a GET route that answers JSON, and with it or with an error at ``statuses``."""
    content = {"application/json": {"schema": answer}}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status in statuses:
        body = content if status == 503 else {"application/json": {"schema": OPENAI_ERROR}}
        responses[str(status)] = {"description": MEANINGS[status], "content": body}
    return {"responses": responses}
