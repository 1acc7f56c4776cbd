"""The OpenAPI description of the ``/v1/embeddings`` body, built from the tables the parser itself uses.

A route takes it as ``openapi_extra=EMBEDDINGS_BODY``. The parser is stricter in what a schema cannot
say, such as fields that contradict each other.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from tessera.frontend.inputs import EmbedDtype, EncodingFormat
from tessera.frontend.shapes.options import FIELDS, INERT
from tessera.frontend.shapes.roles import INPUT_TYPES, MESSAGE_ROLES, TASKS
from tessera.frontend.shapes.scope import Modality
from tessera.models.base import Truncate

Schema = dict[str, Any]

_STRING: Final[Schema] = {"type": "string", "minLength": 1}
_BOOLEAN: Final[Schema] = {"type": "boolean"}
_UUID: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 256}


def _values(kind: type[StrEnum], *more: str) -> Schema:
    return {"type": "string", "enum": [*(member.value for member in kind), *more]}


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _part(kind: str, **properties: Schema) -> Schema:
    return _object(("type", *properties), type={"type": "string", "enum": [kind]}, **properties)


def _image_part(kind: str, key: str) -> Schema:
    part = _part(kind, **{key: _STRING})
    part["properties"]["uuid"] = _UUID
    return part


def _url_part(kind: str) -> Schema:
    part = _image_part(kind, "image_url")
    detail: Schema = {"type": "string", "enum": ["auto"]}
    part["properties"]["detail"] = detail
    part["properties"]["image_url"] = {"anyOf": [_STRING, _object(("url",), url=_STRING, detail=detail)]}
    return part


_PART: Final[Schema] = {
    "anyOf": [
        *(_part(kind, text=_STRING) for kind in ("text", "input_text")),
        *(_url_part(kind) for kind in ("image_url", "input_image")),
        *(_image_part(kind, kind) for kind in ("image_base64", "image")),
    ]
}
_PARTS: Final = _list(_PART)
_CONTENT: Final[Schema] = {"anyOf": [_STRING, _PARTS]}
_MESSAGE: Final = _object(
    ("role", "content"), role={"type": "string", "enum": list(MESSAGE_ROLES)}, content=_CONTENT
)
_CONVERSATION: Final[Schema] = {**_list(_MESSAGE), "maxItems": 1}
_TOKENS: Final = _list({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})
_FUSED: Final = {**_object((), text=_STRING, image=_STRING), "minProperties": 1}
_ITEM: Final[Schema] = {
    "anyOf": [
        _STRING,
        _TOKENS,
        _PARTS,
        _CONVERSATION,
        _MESSAGE,
        _FUSED,
        _object(("content",), content=_CONTENT),
    ]
}
_ONE_OR_EACH: Final[Schema] = {"anyOf": [_values(Modality), _list(_values(Modality))]}
_DTYPES: Final = _values(EmbedDtype, "float")

_PROPERTIES: Final[dict[str, Schema]] = {
    "input": {"anyOf": [_ITEM, _list(_ITEM)], "description": "What to embed; one vector per input."},
    "messages": {
        "anyOf": [_CONVERSATION, _list(_CONVERSATION)],
        "description": "One conversation of one message, or a list of such; instead of input.",
    },
    "model": _STRING,
    "input_type": {"type": "string", "enum": list(INPUT_TYPES)},
    "task": {"type": "string", "enum": list(TASKS)},
    "modality": _ONE_OR_EACH,
    "encoding_format": _values(EncodingFormat),
    "embed_dtype": _DTYPES,
    "embedding_type": _DTYPES,
    "dimensions": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
    "normalize": _BOOLEAN,
    "normalized": _BOOLEAN,
    "use_activation": _BOOLEAN,
    "truncate": {"anyOf": [_values(Truncate), _BOOLEAN]},
    "truncate_prompt_tokens": {
        "type": "integer",
        "minimum": -1,
        "maximum": 2**31 - 1,
        "not": {"enum": [0]},
        "description": "Most tokens of an input; -1 for the model's own limit.",
    },
    "truncation_side": {"type": "string", "enum": ["left", "right"]},
    "partial": {**_BOOLEAN, "description": "Answer the good inputs when others fail."},
    "user": _STRING,
    "priority": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "request_id": {"type": "string", "pattern": "^[!-~]{1,128}$"},
    "rid": {"type": "string", "pattern": "^[!-~]{1,128}$"},
}
_INERT: Final[dict[str, Schema]] = {
    name: {"enum": [*values, None], "description": "Accepted for compatibility; has no effect."}
    for name, values in INERT.items()
}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


EMBEDDINGS_SCHEMA: Final[Schema] = {
    "type": "object",
    "title": "EmbeddingsRequest",
    "properties": {
        **{name: _nullable(schema) for name, schema in _PROPERTIES.items()},
        **_INERT,
    },
    "additionalProperties": False,
}
EMBEDDINGS_BODY: Final[Schema] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": EMBEDDINGS_SCHEMA}}}
}

assert EMBEDDINGS_SCHEMA["properties"].keys() == FIELDS, "the schema and the parser know different fields"
