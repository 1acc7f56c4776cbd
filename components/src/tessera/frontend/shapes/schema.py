"""The OpenAPI description of the ``/v1/embeddings`` body, built from the tables the parser itself uses.

The parser is stricter in what a schema cannot say, such as fields that contradict each other.
"""

from __future__ import annotations

from typing import Final

from tessera.frontend.api.request import EncodingFormat
from tessera.frontend.api.schema import (
    BOOLEAN,
    CONVERSATION,
    DTYPES,
    ITEM,
    STRING,
    WIDTH,
    Schema,
    list_of,
    nullable,
    values_of,
)
from tessera.frontend.shapes.options import FIELDS, INERT
from tessera.frontend.shapes.roles import INPUT_TYPES, TASKS
from tessera.frontend.shapes.scope import Modality
from tessera.models.base import Truncate

_ONE_OR_EACH: Final[Schema] = {"anyOf": [values_of(Modality), list_of(values_of(Modality))]}

_PROPERTIES: Final[dict[str, Schema]] = {
    "input": {"anyOf": [ITEM, list_of(ITEM)], "description": "What to embed; one vector per input."},
    "messages": {
        "anyOf": [CONVERSATION, list_of(CONVERSATION)],
        "description": "One conversation of one message, or a list of such; instead of input.",
    },
    "model": STRING,
    "input_type": {"type": "string", "enum": list(INPUT_TYPES)},
    "task": {"type": "string", "enum": list(TASKS)},
    "modality": _ONE_OR_EACH,
    "encoding_format": values_of(EncodingFormat),
    "embed_dtype": DTYPES,
    "embedding_type": DTYPES,
    "output_dtype": DTYPES,
    "dimensions": WIDTH,
    "output_dimension": WIDTH,
    "normalize": BOOLEAN,
    "normalized": BOOLEAN,
    "use_activation": BOOLEAN,
    "truncate": {"anyOf": [values_of(Truncate), BOOLEAN]},
    "truncation": {"anyOf": [values_of(Truncate), BOOLEAN]},
    "truncate_prompt_tokens": {
        "type": "integer",
        "minimum": -1,
        "maximum": 2**31 - 1,
        "not": {"enum": [0]},
        "description": "Most tokens of an input; -1 for the model's own limit.",
    },
    "truncation_side": {"type": "string", "enum": ["left", "right"]},
    "partial": {**BOOLEAN, "description": "Answer the good inputs when others fail."},
    "user": STRING,
    "priority": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "request_id": {"type": "string", "pattern": "^[!-~]{1,128}$"},
    "rid": {"type": "string", "pattern": "^[!-~]{1,128}$"},
}
_INERT: Final[dict[str, Schema]] = {
    name: {"enum": [*values, None], "description": "Accepted for compatibility; has no effect."}
    for name, values in INERT.items()
}


EMBEDDINGS_SCHEMA: Final[Schema] = {
    "type": "object",
    "title": "EmbeddingsRequest",
    "properties": {
        **{name: nullable(schema) for name, schema in _PROPERTIES.items()},
        **_INERT,
    },
    "additionalProperties": False,
}

assert EMBEDDINGS_SCHEMA["properties"].keys() == FIELDS, "the schema and the parser know different fields"
