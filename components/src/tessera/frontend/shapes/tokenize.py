"""``/tokenize``: vLLM's ``prompt``, or any input that ``/v1/embeddings`` takes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from tessera.errors import InvalidInput
from tessera.frontend.inputs import EmbeddingsRequest, RequestLimits
from tessera.frontend.shapes.embeddings import parse_embeddings
from tessera.frontend.shapes.json_schema import STRING, Schema
from tessera.frontend.shapes.schema import EMBEDDINGS_SCHEMA
from tessera.frontend.shapes.values import Json, json_object, string

SCHEMA: Final[Schema] = {
    **EMBEDDINGS_SCHEMA,
    "title": "TokenizeRequest",
    "properties": {**EMBEDDINGS_SCHEMA["properties"], "prompt": STRING},
}


def parse_tokenize(value: Json, limits: RequestLimits, models: Collection[str]) -> EmbeddingsRequest:
    """A prompt is text and nothing else, so that a data URL in it is counted as what it says."""
    body = json_object(value)
    if body.get("prompt") is None:
        return parse_embeddings(
            {key: entry for key, entry in body.items() if key != "prompt"}, limits=limits, models=models
        )
    if body.get("input") is not None or body.get("messages") is not None:
        raise InvalidInput("prompt: expected either prompt, input or messages", param="prompt")
    text = string(body["prompt"], "prompt")
    rest = {key: entry for key, entry in body.items() if key != "prompt"}
    return parse_embeddings(rest | {"input": text, "modality": "text"}, limits=limits, models=models)
