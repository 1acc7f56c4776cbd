"""Cohere's ``/v2/embed``: texts, images or mixed inputs, and vectors of several types at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec

from tessera.errors import InvalidInput
from tessera.frontend.api.body import (
    Form,
    Instruction,
    ModelName,
    Positive,
    Width,
    about,
    named,
    several,
    unread,
    whole,
)
from tessera.frontend.api.content import InputBuilder, image_at, read_message
from tessera.frontend.api.endpoint import Translated
from tessera.frontend.api.formats import ResponseBody, base64_rows, convert, finish
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import (
    CONTENT,
    INSTRUCTION,
    NUMBERS,
    STRING,
    TEXT,
    WHOLE,
    list_of,
    object_of,
)
from tessera.frontend.api.values import Json, JsonObject, non_empty_list, string
from tessera.frontend.http.errors import Failure
from tessera.frontend.request import EmbeddingsRequest, EmbedDtype, EncodingFormat, Input
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Result
from tessera.frontend.serving.served import Served
from tessera.models.base import TRUNCATIONS, Role, Truncate

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
_INPUT: Final = object_of(optional=("instruction",), content=CONTENT, instruction=INSTRUCTION)


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """Declares the body of ``/v2/embed``."""

    model: ModelName = None
    input_type: Annotated[
        Role | None,
        named(INPUT_TYPES),
        about("What the vectors are for: a search has a prompt for its queries and one for its documents."),
    ] = None
    instruction: Instruction = None
    texts: Annotated[
        Json,
        unread(list_of(STRING)),
        about("Texts to embed, a vector for each.", ["a yellow heart", "an orange triangle"]),
    ] = None
    images: Annotated[
        Json,
        unread(list_of(STRING)),
        about("Images to embed, as data URLs or addresses.", ["data:image/png;base64,iVBORw0KGgo="]),
    ] = None
    inputs: Annotated[
        Json,
        unread(list_of(_INPUT)),
        about(
            "Inputs of texts and images together, a vector for each.",
            [{"content": [{"type": "text", "text": "a yellow heart"}]}],
        ),
    ] = None
    max_tokens: Annotated[
        Positive, about("The most tokens of an input, beyond which it is cut as `truncate` says.", 512)
    ] = None
    output_dimension: Width = None
    embedding_types: Annotated[
        tuple[str, ...],
        several(named({name: name for name in TYPES}), most=16),
        about("The types of vectors that are answered, each under its name.", ["float", "int8"]),
    ] = ("float",)
    truncate: Annotated[
        Truncate,
        named(TRUNCATIONS),
        about("The side that a text which is too long is cut at; NONE: an error."),
    ] = Truncate.END
    priority: Annotated[
        int, whole("0 to 999", 0, 999), about("Requests with lower numbers are answered first.", 10)
    ] = 0


FORM: Final = Form(CohereEmbedRequest)


def write_cohere(
    request: EmbeddingsRequest, types: Sequence[str], texts: Sequence[str], result: Result
) -> ResponseBody:
    """Write the vectors of each of the ``types``; ``texts`` are echoed."""
    vectors = result.rows.values
    width = request.dimensions or vectors.shape[1]
    rows = finish(vectors, width=width, normalize=True)
    usage = result.usage
    units: dict[str, Any] = {"input_tokens": usage.text_tokens}
    if images := sum(len(entry.images) for entry in request.inputs):
        units |= {"images": images, "image_tokens": usage.image_tokens}
    body: dict[str, Any] = {
        "id": result.request_id,
        "response_type": "embeddings_by_type",
        "embeddings": {
            name: base64_rows(rows) if name == "base64" else list(convert(rows, TYPES[name]))
            for name in types
        },
        "meta": {"api_version": {"version": "2"}, "billed_units": units},
    }
    if texts:
        body["texts"] = texts
    return ResponseBody.of_json(body)


def _inputs(body: CohereEmbedRequest, builder: InputBuilder) -> tuple[tuple[Input, ...], tuple[str, ...]]:
    given = [name for name in _CONTENTS if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidInput(
            f"expected exactly one of {', '.join(_CONTENTS)}, found {', '.join(given) or 'none'}",
            param=given[1] if given else "texts",
        )
    (name,) = given
    values = non_empty_list(getattr(body, name), name, most=builder.limits.inputs)
    entries = [(value, f"{name}[{index}]") for index, value in enumerate(values)]
    if name == "texts":
        texts = tuple(string(*entry) for entry in entries)
        return tuple(
            builder.build((text,), path) for text, (_, path) in zip(texts, entries, strict=True)
        ), texts
    if name == "images":
        return tuple(builder.build((image_at(value, path),), path) for value, path in entries), ()
    return tuple(read_message(value, path, builder, owner=path, bare=True) for value, path in entries), ()


def _translate(value: Json, served: Served) -> Translated:
    body = FORM.read(value)
    inputs, texts = _inputs(body, InputBuilder.of(body.instruction, body.input_type, served.limits))
    types = tuple(dict.fromkeys(body.embedding_types))
    packed = [TYPES[name] for name in types if TYPES[name] in (EmbedDtype.BINARY, EmbedDtype.UBINARY)]
    request = EmbeddingsRequest(
        inputs=inputs,
        model=body.model,
        # The one type that asks something of the width, so that it is checked before the work.
        dtype=packed[0] if packed else EmbedDtype.FLOAT32,
        dimensions=body.output_dimension,
        dimensions_param="output_dimension",
        max_tokens=body.max_tokens,
        truncate=body.truncate,
        priority=body.priority,
    )
    forms = tuple(
        (TYPES[name], EncodingFormat.BASE64 if name == "base64" else EncodingFormat.FLOAT) for name in types
    )
    return Translated(request=request, write=partial(write_cohere, request, types, texts), forms=forms)


def write_error(failure: Failure) -> tuple[int, JsonObject]:
    return failure.status, {"message": failure.error["message"]}


_ANSWER: Final = object_of(
    optional=("texts",),
    id=TEXT,
    response_type={"const": "embeddings_by_type"},
    embeddings=object_of(
        optional=TYPES, **{name: list_of(TEXT if name == "base64" else NUMBERS) for name in TYPES}
    ),
    texts=list_of(TEXT),
    meta=object_of(
        api_version=object_of(version=TEXT),
        billed_units=object_of(
            optional=("images", "image_tokens"), input_tokens=WHOLE, images=WHOLE, image_tokens=WHOLE
        ),
    ),
)
_ERROR: Final = object_of(message=TEXT)


def _routes(service: Service) -> list[ApiRoute]:
    return [
        service.endpoint.route(
            "/v2/embed",
            _translate,
            name="embed",
            summary="Embed texts, images or mixed inputs",
            body=FORM.schema,
            answer=_ANSWER,
            error=_ERROR,
        )
    ]


API: Final = ClientApi("Cohere", _routes, error=write_error, place=10)
