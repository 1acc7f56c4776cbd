"""``/tokenize``: vLLM's ``prompt``, or any input that ``/v1/embeddings`` takes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from tessera.errors import InvalidInput
from tessera.frontend.api.openai import EMBEDDINGS_SCHEMA, FIELDS, parse_embeddings
from tessera.frontend.api.request import EmbeddingsRequest, RequestLimits
from tessera.frontend.api.schema import BOOLEAN, STRING, Schema, list_of
from tessera.frontend.api.tei import PROMPTS
from tessera.frontend.api.values import Json, JsonObject, optional_boolean, request_body, string

SCHEMA: Final[Schema] = {
    **EMBEDDINGS_SCHEMA,
    "title": "TokenizeRequest",
    "properties": {
        **EMBEDDINGS_SCHEMA["properties"],
        "prompt": STRING,
        "return_token_strs": BOOLEAN,
        "inputs": {
            "anyOf": [STRING, list_of(STRING)],
            "description": "TEI's form, alone or with prompt_name.",
        },
        "prompt_name": {"type": "string", "enum": list(PROMPTS)},
    },
}
_OWN: Final = ("prompt", "return_token_strs")
# Bodies with ``inputs`` are TEI's, and never come here; the name is for the error alone.
_KNOWN: Final = FIELDS | {*_OWN, "inputs"}


def wants_token_texts(body: JsonObject) -> bool:
    """vLLM's ``return_token_strs``."""
    return optional_boolean(body, "return_token_strs", default=False)


def parse_tokenize(value: Json, limits: RequestLimits, models: Collection[str]) -> EmbeddingsRequest:
    """A prompt is text and nothing else, so that a data URL in it is counted as what it says."""
    body = request_body(value, _KNOWN)
    if body.get("prompt") is None:
        return parse_embeddings(
            {key: entry for key, entry in body.items() if key not in _OWN}, limits=limits, models=models
        )
    if body.get("input") is not None or body.get("messages") is not None:
        raise InvalidInput("prompt: expected either prompt, input or messages", param="prompt")
    text = string(body["prompt"], "prompt")
    rest = {key: entry for key, entry in body.items() if key not in _OWN}
    return parse_embeddings(rest | {"input": text, "modality": "text"}, limits=limits, models=models)
