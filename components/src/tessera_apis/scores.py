"""What the routes that answer scores share: queries and documents, their options, their order, the answer.

A document is a text, ``{"text", "image"}`` with either or both, or ``{"content": [part, ...]}`` with content
parts. A string is a text, whatever it holds. Of an object with ``rank_fields`` those fields are the text, in
their order, a line for each; what else an object with a ``text`` holds is the client's own. A query is the
same without such fields. An ``image`` is a URL, a local path, or base64 without a prefix.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from tessera.errors import InvalidInput
from tessera.frontend.api.body import FLAG, Instruction, about, whole
from tessera.frontend.api.content import InputBuilder, read_object, read_parts
from tessera.frontend.api.formats import sigmoid
from tessera.frontend.api.openai import INERT, MostTokens, Options, TruncateOption
from tessera.frontend.api.schema import ERROR_OBJECT, FUSED, PARTS, STRING, TEXT, Schema, list_of, object_of
from tessera.frontend.api.values import (
    Json,
    JsonObject,
    expected,
    non_empty_list,
    plain_list,
    reject_unknown,
    string,
)
from tessera.frontend.http.errors import Failure
from tessera.frontend.request import Input, RequestLimits, ScoreRequest
from tessera.frontend.serving.pipeline import Scores
from tessera.models.base import OutputKind, Role, Truncate

Floating = np.floating[Any]

SCORE_INERT: Final = {
    name: INERT[name] for name in ("chat_template_kwargs", "mm_processor_kwargs", "padding")
}
_Count = whole("a number of tokens", 0)


class ScoreOptions(Options, kw_only=True):
    """Declares what vLLM's routes take, with Infinity's ``raw_scores`` and NIM's ``truncate``."""

    instruction: Annotated[
        Instruction, Meta(description="What the query is for, for models that take that.")
    ] = None
    truncate: Annotated[
        TruncateOption, Meta(description="Whether a document is cut where it is too long with its query.")
    ] = None
    truncate_prompt_tokens: Annotated[
        MostTokens,
        Meta(description="Most tokens of a query with its document; -1 for the model's own limit."),
    ] = None
    max_tokens_per_query: Annotated[
        int | None, _Count, about("The most tokens of a query, beyond which it is cut; 0 is null.", 64)
    ] = None
    max_tokens_per_doc: Annotated[
        int | None, _Count, about("The most tokens of a document, beyond which it is cut; 0 is null.", 512)
    ] = None
    use_activation: Annotated[
        bool | None,
        FLAG,
        about("Whether a reranker's scores are between 0 and 1; false for its logits.", False),
    ] = None
    raw_scores: Annotated[
        bool | None,
        FLAG,
        about("Whether a reranker's scores are its logits; the opposite of use_activation."),
    ] = None

    def request(
        self, queries: tuple[Input, ...], documents: tuple[Input, ...], *, unasked: Truncate
    ) -> ScoreRequest:
        """Return the request; ``unasked`` is its truncation where none is given."""
        truncate, max_tokens = self.truncation(unasked)
        return ScoreRequest(
            queries=queries,
            documents=documents,
            model=self.model,
            truncate=truncate,
            max_tokens=max_tokens,
            max_query_tokens=self.max_tokens_per_query or None,
            max_document_tokens=self.max_tokens_per_doc or None,
            priority=self.priority,
            request_id=self.request_id,
            cache_salt=self.cache_salt or "",
        )

    def wants_logits(self) -> bool:
        """Return whether a reranker's logits are wanted as they are."""
        if self.use_activation is None:
            return bool(self.raw_scores)
        if self.raw_scores is self.use_activation:
            raise InvalidInput.at("use_activation", "contradicts raw_scores")
        return not self.use_activation


def query_builder(instruction: Json, limits: RequestLimits) -> InputBuilder:
    """Make the builder of queries, which the body's ``instruction`` is for."""
    return InputBuilder.of(instruction, Role.QUERY, limits)


def document_builder(limits: RequestLimits) -> InputBuilder:
    return InputBuilder(role=Role.PASSAGE, limits=limits)


def document_list(value: Json, name: str, limits: RequestLimits) -> Sequence[Json]:
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
    path = f"{param}.content"
    content = plain_list(value["content"], path, "a list of content parts")
    return builder.build(read_parts(content, path, builder), param)


def _joined(value: JsonObject, param: str, builder: InputBuilder, fields: Sequence[str]) -> str:
    given = [(value[name], f"{param}.{name}") for name in fields if value.get(name) is not None]
    if not given:
        raise expected(param, f"an object with {' or '.join(fields)}", value)
    return "\n".join(builder.text(string(text, path), path) for text, path in given)


def ranking(
    scores: Scores, key: str, *, logits: bool = False, most: int | None = None, **returned: Sequence[Json]
) -> list[JsonObject]:
    """Write the ``most`` best documents, the best first; equal ones keep their order.

    Each has its ``index``, its score under ``key``, and what of it is ``returned`` under that name.
    """
    values = relevance(scores, logits=logits)
    # By what the model answered: a sigmoid makes far logits equal.
    order = np.argsort(-scores.values, kind="stable")[: most or None]
    return [
        {"index": index, key: values[index]}
        | {name: given[index] for name, given in returned.items() if given}
        for index in order.tolist()
    ]


def relevance(scores: Scores, *, logits: bool = False) -> npt.NDArray[Floating]:
    """What clients are told: a reranker's probabilities, unless they ask for its logits or the checkpoint
    declares these as its scores; cosines and MaxSims as they are."""
    values = scores.values
    if scores.kind is not OutputKind.SCORE or logits or scores.activation == "identity":
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


ERROR: Final = object_of(error=ERROR_OBJECT, message=TEXT, detail=TEXT)

DOCUMENT_SCHEMA: Final[Schema] = {
    "anyOf": [
        STRING,
        {"type": "object", "properties": {"text": STRING, "image": STRING}},
        object_of(content=PARTS),
    ]
}
QUERY_SCHEMA: Final[Schema] = {"anyOf": [STRING, *FUSED["anyOf"], object_of(content=PARTS)]}
QUERY_EXAMPLE: Final = "What is the capital of Japan?"
DOCUMENTS_EXAMPLE: Final = ["Tokyo is the capital of Japan.", "Kyoto was it before."]
DOCUMENTS_SCHEMA: Final[Schema] = {"anyOf": [list_of(DOCUMENT_SCHEMA), *DOCUMENT_SCHEMA["anyOf"]]}
SCORE: Final[Schema] = {"type": "number"}
