"""The OpenAPI description of a route: its body, its answer and its errors."""

from __future__ import annotations

from typing import Any, Final

from tessera.frontend.api.schema import Schema, object_of, request_body
from tessera.frontend.http.errors import MEANINGS

_TEXT: Final[Schema] = {"type": "string"}
_MAYBE_TEXT: Final[Schema] = {"type": ["string", "null"]}

ERROR_OBJECT: Final = object_of(
    ("message", "type", "param", "code"), message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_TEXT
)
OPENAI_ERROR: Final = object_of(("error",), error=ERROR_OBJECT)
COHERE_ERROR: Final = object_of(("message",), message=_TEXT)
VOYAGE_ERROR: Final = object_of(("detail",), detail=_TEXT)
TEI_ERROR: Final = object_of(("error", "error_type"), error=_TEXT, error_type=_TEXT)

NUMBERS: Final[Schema] = {"type": "array", "items": {"type": "number"}}
WHOLE: Final[Schema] = {"type": "integer", "minimum": 0}


def operation(*, body: Schema, answer: Schema, error: Schema, **others: Schema) -> dict[str, Any]:
    """``openapi_extra`` for a POST route; ``others`` are further media types of the answer."""
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
    return request_body(body) | {"responses": responses}


def answers(answer: Schema, *statuses: int) -> dict[str, Any]:
    """``openapi_extra`` for a GET route that answers JSON, and with it or with an error at ``statuses``."""
    content = {"application/json": {"schema": answer}}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status in statuses:
        body = content if status == 503 else {"application/json": {"schema": OPENAI_ERROR}}
        responses[str(status)] = {"description": MEANINGS[status], "content": body}
    return {"responses": responses}
