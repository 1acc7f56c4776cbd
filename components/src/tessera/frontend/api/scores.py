"""What the routes that answer scores share: queries and documents, their options, their order, the answer.

A document is a text, ``{"text", "image"}`` with either or both, or ``{"content": [part, ...]}`` with content
parts. A string is a text, whatever it holds. Of an object with ``rank_fields`` those fields are the text, in
their order, a line for each; what else an object with a ``text`` holds is the client's own. A query is the
same without such fields. An ``image`` is a URL, a local path, or base64 without a prefix.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.errors import InvalidInput
from tessera.frontend.api.content import InputBuilder, read_object, read_parts
from tessera.frontend.api.formats import sigmoid
from tessera.frontend.api.openai import INERT, priority_of, request_id_of, truncation
from tessera.frontend.api.schema import (
    BOOLEAN,
    ERROR_OBJECT,
    INSTRUCTION,
    PARTS,
    STRING,
    Schema,
    inert_schemas,
    list_of,
    object_of,
    values_of,
)
from tessera.frontend.api.values import (
    INT32,
    Json,
    JsonObject,
    expected,
    integer,
    non_empty_list,
    optional_boolean,
    optional_string,
    reject_inert,
    reject_unknown,
    string,
)
from tessera.frontend.http.errors import Failure
from tessera.frontend.request import Input, RequestLimits, ScoreRequest
from tessera.frontend.serving.pipeline import Scores
from tessera.models.base import OutputKind, Role, Truncate

Floating = np.floating[Any]

SCORE_INERT: Final = {
    name: INERT[name] for name in ("cache_salt", "chat_template_kwargs", "mm_processor_kwargs", "padding")
}
OPTIONS: Final = (
    *("model", "instruction", "truncate", "truncate_prompt_tokens", "truncation_side"),
    *("max_tokens_per_query", "max_tokens_per_doc", "use_activation", "raw_scores"),
    *("priority", "request_id", "user", *SCORE_INERT),
)
"""What vLLM's routes take, with Infinity's ``raw_scores`` and NIM's ``truncate``."""


def read_options(
    body: JsonObject, *, unasked: Truncate, inert: dict[str, tuple[Json, ...]] = SCORE_INERT
) -> partial[ScoreRequest]:
    """The request but for its queries and documents; ``unasked`` is its truncation where none is given."""
    reject_inert(body, inert)
    truncate, max_tokens = truncation(body, unasked)
    return partial(
        ScoreRequest,
        model=optional_string(body, "model"),
        truncate=truncate,
        max_tokens=max_tokens,
        max_query_tokens=_bound(body, "max_tokens_per_query"),
        max_document_tokens=_bound(body, "max_tokens_per_doc"),
        user=optional_string(body, "user"),
        priority=priority_of(body),
        request_id=request_id_of(body),
    )


def wants_logits(body: JsonObject) -> bool:
    """Infinity's and TEI's ``raw_scores``, vLLM's ``use_activation``: a reranker's logits, as they are."""
    raw, activation = (optional_boolean(body, name, default=False) for name in ("raw_scores", _ACTIVATION))
    if body.get(_ACTIVATION) is None:
        return raw
    if body.get("raw_scores") is not None and raw is activation:
        raise InvalidInput(f"{_ACTIVATION}: contradicts raw_scores", param=_ACTIVATION)
    return not activation


_ACTIVATION: Final = "use_activation"


def _bound(body: JsonObject, name: str) -> int | None:
    """A number of tokens; vLLM's 0 is none."""
    value = body.get(name)
    return (
        None if value is None else integer(value, name, low=0, high=INT32, what="a number of tokens") or None
    )


def query_builder(instruction: Json, limits: RequestLimits) -> InputBuilder:
    """Make the builder of queries, which the body's ``instruction`` is for."""
    return InputBuilder.of(instruction, Role.QUERY, limits)


def document_builder(limits: RequestLimits) -> InputBuilder:
    return InputBuilder(role=Role.PASSAGE, limits=limits)


def document_list(value: Json, name: str, limits: RequestLimits) -> list[Json]:
    """Return the documents as the client sent them; one alone need not be in a list."""
    return [value] if isinstance(value, str | dict) else non_empty_list(value, name, most=limits.documents)


def read_documents(
    given: Sequence[Json], name: str, limits: RequestLimits, fields: Sequence[str] = ()
) -> tuple[Input, ...]:
    builder = document_builder(limits)
    return tuple(
        _read_document(value, f"{name}[{index}]", builder, fields) for index, value in enumerate(given)
    )


def _read_document(value: Json, param: str, builder: InputBuilder, fields: Sequence[str]) -> Input:
    if isinstance(value, dict) and fields:
        return builder.build((_joined(value, param, builder, fields),), param)
    if isinstance(value, dict) and "text" in value:
        value = {key: value.get(key) for key in ("text", "image")}
    return read_item(value, param, builder)


def read_item(value: Json, param: str, builder: InputBuilder) -> Input:
    if isinstance(value, str):
        return builder.build((builder.text(value, param),), param)
    if not isinstance(value, dict):
        raise expected(param, "text, or an object with text, image or content", value)
    if "content" not in value:
        return read_object(value, param, builder)
    reject_unknown(value, ("content",), param)
    content, path = value["content"], f"{param}.content"
    if not isinstance(content, list):
        raise expected(path, "a list of content parts", content)
    return builder.build(read_parts(content, path, builder), param)


def _joined(value: JsonObject, param: str, builder: InputBuilder, fields: Sequence[str]) -> str:
    given = [(value[name], f"{param}.{name}") for name in fields if value.get(name) is not None]
    if not given:
        raise expected(param, f"an object with {' or '.join(fields)}", value)
    return "\n".join(builder.text(string(text, path), path) for text, path in given)


def ranked(scores: Scores, *, logits: bool = False, most: int | None = None) -> list[tuple[int, Floating]]:
    """The index and the score of the ``most`` best documents, the best first; equal ones keep their order."""
    values = relevance(scores, logits=logits)
    # By what the model answered: a sigmoid makes far logits equal.
    order = np.argsort(-scores.values, kind="stable")[: most or None]
    return [(int(index), values[index]) for index in order]


def relevance(scores: Scores, *, logits: bool = False) -> npt.NDArray[Floating]:
    """What clients are told: a reranker's probabilities, unless they ask for its logits; cosines and MaxSims
    as they are."""
    values = scores.values
    if scores.kind is not OutputKind.SCORE or logits:
        return values
    return sigmoid(values)


def head(kind: str, id_prefix: str, scores: Scores, model: str) -> JsonObject:
    """How an answer of vLLM's, Infinity's or Jina's shape begins."""
    return {
        "id": f"{id_prefix}-{scores.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def write_error(failure: Failure) -> tuple[int, JsonObject]:
    """For routes of several clients: vLLM's and Infinity's ``error``, Cohere's ``message``, the ``detail``
    that Jina's, Voyage's and NVIDIA's clients read."""
    message = failure.error["message"]
    return failure.status, {"error": failure.error, "message": message, "detail": message}


ERROR: Final = object_of(
    ("error", "message", "detail"), error=ERROR_OBJECT, message={"type": "string"}, detail={"type": "string"}
)

DOCUMENT_SCHEMA: Final[Schema] = {
    "anyOf": [
        STRING,
        {"type": "object", "properties": {"text": STRING, "image": STRING}},
        object_of(("content",), content=PARTS),
    ]
}
QUERY_SCHEMA: Final[Schema] = {
    "anyOf": [
        STRING,
        *(
            object_of((name,), text=STRING, image=STRING, instruction=INSTRUCTION)
            for name in ("text", "image")
        ),
        object_of(("content",), content=PARTS),
    ]
}
DOCUMENTS_SCHEMA: Final[Schema] = {"anyOf": [list_of(DOCUMENT_SCHEMA), *DOCUMENT_SCHEMA["anyOf"]]}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": INT32, "description": "0 is null."}
OPTION_SCHEMAS: Final[dict[str, Schema]] = {
    "model": STRING,
    "instruction": {**STRING, "description": "What the query is for, for models that take that."},
    "truncate": {
        "anyOf": [values_of(Truncate), BOOLEAN],
        "description": "Whether a document is cut where it is too long with its query.",
    },
    "truncate_prompt_tokens": {
        "type": "integer",
        "minimum": -1,
        "maximum": INT32,
        "not": {"enum": [0]},
        "description": "Most tokens of a query with its document; -1 for the model's own limit.",
    },
    "truncation_side": {"type": "string", "enum": ["left", "right"]},
    "max_tokens_per_query": COUNT,
    "max_tokens_per_doc": COUNT,
    "use_activation": {**BOOLEAN, "description": "false for a reranker's logits."},
    "raw_scores": {**BOOLEAN, "description": "true for a reranker's logits."},
    "priority": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "request_id": {"type": "string", "pattern": "^[!-~]{1,128}$"},
    "user": STRING,
    **inert_schemas(SCORE_INERT),
}
SCORE: Final[Schema] = {"type": "number"}
