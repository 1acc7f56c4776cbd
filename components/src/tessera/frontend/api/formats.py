"""Results, and vectors as the bytes of a response: width, element type, encoding, the body around them.

========  =====================================================================================
dtype     values
========  =====================================================================================
float32   as they are
float16   rounded to nearest even
bfloat16  rounded to nearest even; in JSON the rounded numbers, else their upper 16 bits
int8      ``round(127 * x / max|x|)`` of the row: cosines survive, lengths do not
uint8     the int8 value plus 128
ubinary   eight signs to a byte, most significant bit first, 1 for ``x >= 0``
binary    the ubinary byte minus 128
========  =====================================================================================

The integer scale is the row's own largest value, because a unit vector of 2048 values holds none much
above 0.1: a fixed scale of 127 would leave a handful of levels.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from tessera import wire
from tessera.dtypes import bfloat16_bits, from_bfloat16_bits
from tessera.errors import EngineFailed, InvalidInput, TesseraError
from tessera.frontend.api.request import EmbeddingsRequest, EmbedDtype, EncodingFormat
from tessera.frontend.http.errors import error_object

Vectors = npt.NDArray[np.float32]
Values = npt.NDArray[Any]

_EPSILON: Final = 1e-12
_PACKED: Final = (EmbedDtype.BINARY, EmbedDtype.UBINARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole request; cached ones are image tokens whose rows no encoder had to compute."""

    text_tokens: int
    image_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.text_tokens + self.image_tokens

    def as_json(self) -> dict[str, Any]:
        total = self.total_tokens
        details = {
            "text_tokens": self.text_tokens,
            "image_tokens": self.image_tokens,
            "cached_tokens": self.cached_tokens,
        }
        return {"prompt_tokens": total, "total_tokens": total, "prompt_tokens_details": details}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBody:
    """A finished body; ``headers`` are those that belong to it, without the content type."""

    content: bytes
    media_type: str
    headers: dict[str, str]


def check_width(hidden: int, dimensions: int | None, dtype: EmbedDtype, param: str = "dimensions") -> int:
    """The width of the vectors to send, checked before anything is computed.

    Raises ``InvalidInput``, naming ``param``, for more dimensions than there are, and for a packed type whose
    width is not a multiple of 8. Which widths a model was trained for is the caller's to check.
    """
    width = hidden if dimensions is None else dimensions
    if not 0 < width <= hidden:
        raise InvalidInput(
            f"{param}: expected 1 to {hidden}, the model's own width, found {width}", param=param
        )
    if dtype in _PACKED and width % 8:
        raise InvalidInput(
            f"{param}: {dtype.value} packs eight values to a byte, and {width} is not a multiple of 8",
            param=param,
        )
    return width


def finish(vectors: Vectors, *, width: int, normalize: bool) -> Vectors:
    """Cut ``[n, hidden]`` to ``[n, width]`` and, if asked, make unit vectors unit vectors again.

    Rows that are not cut are left untouched, and a row of zeros stays zeros.
    """
    if not np.isfinite(vectors).all():
        raise EngineFailed("the engine produced values that are not finite")
    cut = vectors[:, :width]
    if normalize and width < vectors.shape[1]:
        cut = cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), _EPSILON)
    return np.ascontiguousarray(cut, dtype="<f4")


def convert(vectors: Vectors, dtype: EmbedDtype) -> Values:
    """The values of each row in an element type; bfloat16 as uint16 bit patterns, packed types as bytes."""
    match dtype:
        case EmbedDtype.FLOAT32:
            return vectors
        case EmbedDtype.FLOAT16:
            return vectors.astype("<f2")
        case EmbedDtype.BFLOAT16:
            return bfloat16_bits(vectors)
        case EmbedDtype.INT8 | EmbedDtype.UINT8:
            scale = 127.0 / np.maximum(np.abs(vectors).max(axis=1, keepdims=True), _EPSILON)
            whole: Values = np.rint(vectors * scale).astype(np.int16)
            return whole.astype(np.int8) if dtype is EmbedDtype.INT8 else (whole + 128).astype(np.uint8)
        case EmbedDtype.BINARY | EmbedDtype.UBINARY:
            packed = np.packbits(vectors >= 0, axis=1)
            return packed if dtype is EmbedDtype.UBINARY else (packed ^ 0x80).view(np.int8)


def numbers(values: Values, dtype: EmbedDtype) -> Values:
    """Converted values as an array that JSON can hold."""
    if dtype is EmbedDtype.BFLOAT16:
        return from_bfloat16_bits(values)
    return values


def embeddings_body(
    vectors: Vectors,
    request: EmbeddingsRequest,
    *,
    model: str,
    identifier: str,
    created: int,
    usage: Usage,
    failures: Mapping[int, TesseraError] | None = None,
) -> ResponseBody:
    """OpenAI's list of embeddings in the encoding the request asks for; ``created`` in Unix seconds.

    Rows of failed inputs are ignored: in JSON their ``embedding`` is null and an ``error`` stands beside
    it; in a ``bytes`` body they are zeros, listed under ``errors`` in the metadata.
    """
    failures = failures or {}
    width = check_width(vectors.shape[1], request.dimensions, request.dtype)
    values = convert(finish(vectors, width=width, normalize=request.normalize), request.dtype)
    head = {"id": identifier, "object": "list", "created": created, "model": model}
    if request.encoding_format is EncodingFormat.BYTES:
        return _raw(values, request.dtype, head, usage, failures)
    if request.encoding_format is EncodingFormat.BASE64:
        rows: list[Any] = [b64encode(row).decode("ascii") for row in values]
    else:
        rows = list(numbers(values, request.dtype))
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)
    ]
    for index, error in failures.items():
        data[index] |= {"embedding": None, "error": error_object(error)}
    body = {**head, "data": data, "usage": usage.as_json()}
    return ResponseBody(
        content=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY),
        media_type="application/json",
        headers={},
    )


def _raw(
    values: Values,
    dtype: EmbedDtype,
    head: dict[str, Any],
    usage: Usage,
    failures: Mapping[int, TesseraError],
) -> ResponseBody:
    """The rows one after another, and a ``metadata`` header that says how to read them.

    All rows have one shape, so the header gives it once instead of once for each row: a header that
    grows with the batch runs into the limits of clients and proxies.
    """
    if failures:
        values = values.copy()  # it may be the engine's own, read-only
        values[list(failures)] = 0
    metadata = {
        **head,
        "embed_dtype": dtype.value,
        "endianness": "little",
        "shape": list(values.shape),
        "usage": usage.as_json(),
    }
    if failures:
        metadata["errors"] = {str(index): error_object(error)["code"] for index, error in failures.items()}
    return ResponseBody(
        content=values.tobytes(),
        media_type="application/octet-stream",
        # Headers are ASCII; a model's name need not be.
        headers={"metadata": json.dumps(metadata, ensure_ascii=True, separators=(",", ":"))},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Vectors in input order, float32 ``[inputs, hidden]``; rows of failed inputs are zeros.

    They are unit vectors, or as the model pooled them when the request asked for that.

    ``image_pixels`` counts the pixels of all images as they were sent.
    """

    vectors: npt.NDArray[np.float32]
    errors: dict[int, TesseraError]
    usage: Usage
    image_pixels: int
    timings: wire.Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An ``Embedded`` with what a response says about itself; ``created`` is in Unix seconds."""

    embedded: Embedded
    model: str
    request_id: str
    created: int
