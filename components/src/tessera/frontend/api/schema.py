"""Pieces of JSON Schema and of OpenAPI that routes are described with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from tessera.frontend.api.content import MESSAGE_ROLES
from tessera.frontend.http.errors import MEANINGS
from tessera.frontend.media import MAX_SIDE
from tessera.models.base import OutputKind

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
MAYBE_TEXT: Final[Schema] = {"type": ["string", "null"]}
NUMBERS: Final[Schema] = {"type": "array", "items": {"type": "number"}}
WHOLE: Final[Schema] = {"type": "integer", "minimum": 0}
STRING: Final[Schema] = {"type": "string", "minLength": 1}
BOOLEAN: Final[Schema] = {"type": "boolean"}
INSTRUCTION: Final[Schema] = {
    **STRING,
    "description": "What the vectors are to be good for, in a sentence, for models that take that.",
}
UUID: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 256}


def object_of(optional: Collection[str] = (), **properties: Schema) -> Schema:
    """Describe an object with these properties and no others, of which all but the ``optional`` are there."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def part_of(kind: str, **properties: Schema) -> Schema:
    return object_of(type={"type": "string", "enum": [kind]}, **properties)


_SIDES: Final[Schema] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1, "maximum": MAX_SIDE - 1},
    "minItems": 3,
    "maxItems": 3,
}
EMBEDS: Final = object_of(
    optional=("image_grid_thw",),
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
        "anyOf": [STRING, object_of(optional=("detail",), url=STRING, detail=detail), {"type": "null"}]
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
    optional=("instruction",),
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
        object_of(optional=(other, "instruction"), text=STRING, image=STRING, instruction=INSTRUCTION)
        for other in ("image", "text")
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
        object_of(optional=("instruction",), content=CONTENT, instruction=INSTRUCTION),
    ]
}


def inert_schemas(inert: Mapping[str, tuple[object, ...]]) -> dict[str, Schema]:
    """Fields of other servers, with the values besides null that change nothing."""
    return {
        name: {
            "enum": [*values, None],
            "description": "Accepted for compatibility; has no effect.",
            "examples": [values[0] if values else None],
        }
        for name, values in inert.items()
    }


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def answer_of(kind: str, **properties: Schema) -> Schema:
    """Describe an answer of OpenAI's shape: what stands before its properties, and these."""
    return object_of(id=TEXT, object={"const": kind}, created=WHOLE, model=TEXT, **properties)


ERROR_OBJECT: Final = object_of(message=TEXT, type=TEXT, param=MAYBE_TEXT, code=TEXT)
OPENAI_ERROR: Final = object_of(error=ERROR_OBJECT)

DESCRIBED: Final[dict[str, Schema]] = {
    "family": TEXT,
    "output": object_of(
        kind={"type": "string", "enum": [kind.value for kind in OutputKind]},
        width=WHOLE,
        dimensions={
            "type": "array",
            "items": {"type": "array", "items": WHOLE, "minItems": 2, "maxItems": 2},
            "description": "The widths that requests may ask for: ranges of the least and the most.",
        },
    ),
    "outputs": {
        **list_of(
            object_of(
                name=TEXT,
                kind={"type": "string", "enum": [kind.value for kind in OutputKind]},
                width=WHOLE,
                most=nullable(WHOLE),
            )
        ),
        "description": "What `output_types` may name, the default first. `most` bounds the rows of an input; "
        "null: one for each token where there are several.",
    },
    "late_chunking": {
        "type": "boolean",
        "description": "Whether the chunks of a document may have a vector each of one pass over the whole.",
    },
    "images": {"type": "boolean", "description": "Whether the model takes images."},
    "precision": {
        **list_of(object_of(role=TEXT, dtype=TEXT, rounding=TEXT)),
        "description": "What the workers that are there compute in, one entry for each kind of them: the "
        "type, and what is rounded beyond it, of the vision stage and of the text stage.",
    },
    "task": {**TEXT, "description": "What it does, as `/pooling` calls that."},
    "pooling": {
        **nullable(list_of(TEXT)),
        "description": "How a vector is made of the tokens' states, in the words of sentence-transformers; "
        "null for token vectors and scores.",
    },
    "pooling_assumed": {
        "type": "boolean",
        "description": "Whether neither the checkpoint nor an option says it: then it is the mean.",
    },
    "assumed": {
        "type": "array",
        "items": TEXT,
        "description": "What neither says, so that the family fills it in: `pooling`, `prompts`, or a key of "
        "the checkpoint's files.",
    },
    "prompts": {
        "type": "object",
        "additionalProperties": TEXT,
        "description": "The prompts that the checkpoint declares, by name.",
    },
    "routes": {
        "type": "array",
        "items": TEXT,
        "description": "The routes that answer what comes out of it; others are 404 with the reason.",
    },
    "source": {
        "description": "What of a hub is served, null for a directory. `cached` says why a copy from before "
        "is used though the hub has not confirmed it.",
        **nullable(object_of(repository=TEXT, revision=TEXT, commit=TEXT, cached=MAYBE_TEXT)),
    },
}
"""What ``service.described`` says of a model."""


OUTPUTS: Final = "x-output-kinds"
"""Of a route that answers what comes out of the model: the outputs of the models that it answers for."""


def operation(
    *,
    body: Schema,
    answer: Schema,
    error: Schema = OPENAI_ERROR,
    kinds: frozenset[OutputKind] | None = None,
    **others: Schema,
) -> dict[str, Any]:
    """``openapi_extra`` for a POST route; ``others`` are further media types of the answer.

    ``kinds`` are those that the route's ``Endpoint.answer`` is given.
    """
    content = json_of(answer) | {
        name.replace("__", "/").replace("_", "-"): {"schema": value} for name, value in others.items()
    }
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status, meaning in MEANINGS.items():
        responses[str(status)] = {"description": meaning, "content": json_of(error)}
    outputs = {} if kinds is None else {OUTPUTS: [kind.value for kind in OutputKind if kind in kinds]}
    taken = {"required": True, "content": json_of(body)}
    return {"requestBody": taken, "responses": responses} | outputs


def json_of(schema: Schema) -> dict[str, Any]:
    """Describe a body in JSON."""
    return {"application/json": {"schema": schema}}
