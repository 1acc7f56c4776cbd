"""vLLM's ``/pooling``: what comes out of the model for each input, whatever its output is.

==================  =========================  =====================
task                output of the model        ``data`` of an input
==================  =========================  =====================
``token_embed``     a vector for each token    a matrix
``embed``           one vector                 a vector
``classify``        a score                    a list with it
``token_classify``  a weight for each token    a list of them
==================  =========================  =====================

The first that a served model does is taken where a request names none. Inputs and options are those of
``/v1/embeddings``. vLLM's base64 leaves the shape of a matrix out; here it stands beside it. An input of a
reranker is a whole prompt, with both sides of the pair in it, and its score a probability unless the request
asks for the logit. The first and the last token of an input have no weight.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final

import msgspec
import numpy as np

from tessera.errors import InvalidInput
from tessera.frontend.api.endpoint import DENSE, Translated
from tessera.frontend.api.formats import ResponseBody, matrices, sigmoid
from tessera.frontend.api.openai import (
    EMBEDDINGS,
    MATRIX,
    SHAPE,
    USAGE,
    bytes_body,
    finished,
    parse_embeddings,
    put_errors,
    row_entries,
    usage_object,
)
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import (
    ERROR_OBJECT,
    NUMBERS,
    TEXT,
    WHOLE,
    Schema,
    answer_of,
    list_of,
    nullable,
    object_of,
)
from tessera.frontend.api.values import Json, JsonObject, clip, expected, json_object, reject_unknown
from tessera.frontend.request import EmbeddingsRequest, EmbedDtype, EncodingFormat
from tessera.frontend.service import TASKS, ClientApi, Service
from tessera.frontend.serving.pipeline import Result
from tessera.frontend.serving.served import Served
from tessera.models.base import TOKEN_WEIGHTS, Output, OutputKind

_FLOATS: Final = (EmbedDtype.FLOAT32, EmbedDtype.FLOAT16, EmbedDtype.BFLOAT16)

# Rows are vectors, or scores.
_TASKS: Final = {kind: task for kind, task in TASKS.items() if kind in DENSE}

# Of ``metadata``: Python's own client reads headers of 64 KiB, and an input takes 122 bytes of one at most.
_MOST_INPUTS: Final = 500

# The task says the first, and vLLM refuses the others here.
_LEFT_OUT: Final = (
    "return_multivector",
    "dimensions",
    "output_dimension",
    "output_types",
    "return_dense",
    "return_sparse",
    "return_colbert_vecs",
    "return_tokens",
    "max_active_dims",
    "late_chunking",
)
_TOKEN_CLASSIFY: Final = "token_classify"

SCHEMA: Final[Schema] = {
    **EMBEDDINGS.schema,
    "title": "PoolingRequest",
    "properties": {
        **{name: schema for name, schema in EMBEDDINGS.schema["properties"].items() if name not in _LEFT_OUT},
        "task": nullable({"type": "string", "enum": [*_TASKS.values(), _TOKEN_CLASSIFY]})
        | {
            "description": "What the model does, as `GET /v1/models` says it; others are refused.",
            "examples": ["embed"],
        },
    },
}


def parse_pooling(value: Json, served: Served) -> EmbeddingsRequest:
    body = json_object(value)
    reject_unknown(body, EMBEDDINGS.names | {"data"}, "")
    for name in _LEFT_OUT:
        if body.get(name) is not None:
            raise InvalidInput.at(name, "not supported by /pooling")
    if body.get("data") is not None:
        raise InvalidInput.at("data", "is for plugins of other servers; send input or messages")
    names, output = _asked(body.get("task"), served)
    rest: JsonObject = {name: entry for name, entry in body.items() if name not in ("task", "data")}
    request = parse_embeddings(rest, limits=served.limits, models=served.names)
    if request.encoding_format is EncodingFormat.BYTES and len(request.inputs) > _MOST_INPUTS:
        raise InvalidInput.at(
            "encoding_format",
            f"the header that describes {len(request.inputs)} inputs would be longer than "
            f"clients read; send at most {_MOST_INPUTS}, or ask for base64 or bytes_only",
        )
    request = msgspec.structs.replace(request, outputs=names)
    if output.width == 1 and request.dtype not in _FLOATS:
        raise InvalidInput.at(
            "embed_dtype", f"a score has no {request.dtype.value}; expected one of {', '.join(_FLOATS)}"
        )
    return request


def _asked(value: Json, served: Served) -> tuple[tuple[str, ...], Output]:
    """Return the output that a task means, as a request names it, and itself; the default without a task."""
    if value is None:
        return (), served.output
    names = {task: served.of_kind(kind) for kind, task in _TASKS.items() if kind in served.kinds}
    if TOKEN_WEIGHTS in served.unlisted:
        names[_TOKEN_CLASSIFY] = (TOKEN_WEIGHTS,)
    does = " or ".join(names)
    if not isinstance(value, str):
        raise expected("task", does, value)
    if value not in names:
        raise InvalidInput.at("task", f"{served.model!r} does {does}, and not {clip(value)!r}")
    return names[value], served.asked(names[value])[0]


def write_pooling(request: EmbeddingsRequest, served: Served, result: Result) -> ResponseBody:
    """vLLM's answer; in a ``bytes`` body each input's part and its shape stand in the header ``metadata``."""
    rows = result.rows.values
    (output,) = served.asked(request.outputs)
    if output.kind is OutputKind.SCORE and output.activation == "sigmoid" and request.normalize:
        rows = sigmoid(rows).astype(np.float32)
    values = finished(rows, request, output)
    if output.name == TOKEN_WEIGHTS:
        # A number for each token, not a row of one.
        values = values[:, 0]
    head = {
        "id": f"pooling-{result.request_id}",
        "created": int(time.time()),
        "model": served.model,
    }
    usage = usage_object(result.usage)
    tokens = output.kind is OutputKind.TOKENS
    if request.encoding_format is EncodingFormat.BYTES_ONLY:
        return ResponseBody.of_bytes(values)
    if request.encoding_format is EncodingFormat.BYTES:
        row = values.nbytes // max(1, len(values))
        parts = [
            {
                "index": index,
                "embed_dtype": request.dtype.value,
                "endianness": "big" if request.big_endian else "little",
                "start": row * int(result.rows.bounds[index]),
                "end": row * int(result.rows.bounds[index + 1]),
                "shape": list(part.shape if tokens else part.shape[1:]),
            }
            for index, part in enumerate(matrices(values, result.rows.bounds))
        ]
        return bytes_body(values, {**head, "data": parts, "usage": usage}, result)
    entries = row_entries(values, result.rows.bounds if tokens else None, request, "data")
    data = [{"index": index, "object": "pooling", **entry} for index, entry in enumerate(entries)]
    put_errors(data, result, "data")
    return ResponseBody.of_json({**head, "object": "list", "data": data, "usage": usage})


def _translate(body: Json, served: Served) -> Translated:
    request = parse_pooling(body, served)
    return Translated(request=request, write=partial(write_pooling, request, served))


_ROW: Final = object_of(
    optional=("shape", "error"),
    index=WHOLE,
    object={"const": "pooling"},
    data={"anyOf": [NUMBERS, MATRIX, TEXT, {"type": "null"}]},
    shape=SHAPE,
    error=ERROR_OBJECT,
)
_ANSWER: Final = answer_of("list", data=list_of(_ROW), usage=USAGE)


def _routes(service: Service) -> list[ApiRoute]:
    return [
        service.endpoint.route(
            "/pooling",
            _translate,
            name="pooling",
            summary="What comes out of the model",
            body=SCHEMA,
            answer=_ANSWER,
            kinds=DENSE,
            application__octet_stream={"type": "string", "format": "binary"},
        )
    ]


API: Final = ClientApi("vLLM", _routes, place=70)
