"""Vectors as a response holds them: width, element type, encoding.

========  =====================================================================================
dtype     values
========  =====================================================================================
float32   as they are
float16   rounded to nearest even
bfloat16  rounded to nearest even; in JSON the rounded numbers, else their upper 16 bits
int8      ``round(127 * x / max|x|)`` of the row: cosines survive, lengths do not
uint8     the int8 value plus 128
ubinary   eight signs to a byte, most significant bit first, 1 for ``x > 0``
binary    the ubinary byte minus 128
========  =====================================================================================

The integer scale is the row's own largest value, because a unit vector of 2048 values holds none much
above 0.1: a fixed scale of 127 would leave a handful of levels. Each of an input's token vectors is a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from tessera.dtypes import bfloat16_bits, from_bfloat16_bits
from tessera.errors import InvalidInput
from tessera.frontend.request import EmbedDtype, EncodingFormat

Vectors = npt.NDArray[np.float32]
Values = npt.NDArray[Any]

_EPSILON: Final = 1e-12
LARGEST: Final[Mapping[str, float]] = {"float16": 65520.0, "bfloat16": (2 - 2**-8) * 2.0**127}
"""The least value that each type rounds to infinity."""


Content = bytes | memoryview | tuple[bytes, ...]
"""A body as a whole, or in pieces that are sent one after the other: a page of 17 MB is never joined."""


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A finished body; ``headers`` are those that belong to it, without the content type."""

    content: Content
    media_type: str
    headers: dict[str, str]

    @classmethod
    def of_json(cls, value: Any, headers: dict[str, str] | None = None) -> ResponseBody:
        """``value`` may hold numpy arrays, and ``Long`` parts."""
        return cls(content=json_content(value), media_type="application/json", headers=headers or {})

    @classmethod
    def of_bytes(cls, values: Values, metadata: dict[str, Any] | None = None) -> ResponseBody:
        """The values as they lie in memory, and in a header, if any, what says how to read them."""
        return cls(
            content=np.ascontiguousarray(values).reshape(-1).view(np.uint8).data,
            media_type="application/octet-stream",
            # Headers are ASCII; a model's name need not be.
            headers={}
            if metadata is None
            else {"metadata": json.dumps(metadata, ensure_ascii=True, separators=(",", ":"))},
        )


def finish(vectors: Vectors, *, width: int, normalize: bool) -> Vectors:
    """Cut ``[n, own width]`` to ``[n, width]`` and, if asked, make unit vectors unit vectors again.

    Rows that are not cut are left untouched, and a row of zeros stays zeros.
    """
    cut = vectors[:, :width]
    if normalize and width < vectors.shape[1]:
        cut = cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), _EPSILON)
    return np.ascontiguousarray(cut, dtype="<f4")


def check_range(vectors: Vectors, largest: float, dtype: str, param: str) -> None:
    """Raise ``InvalidInput`` naming ``param`` for a finite value that would become infinite in the type."""
    # Two passes: 4 µs for a row of 2,048 values, 7 for 16 of them.
    most = float(np.abs(vectors).max(initial=0.0))
    if most >= largest:
        raise InvalidInput.at(param, f"{dtype} holds no value as large as {most:.6g}")


def sigmoid(logits: Vectors) -> npt.NDArray[np.float64]:
    """Logits as probabilities, in float64: it tells logits apart up to 36, float32 up to 16."""
    probabilities: npt.NDArray[np.float64] = 1 / (1 + np.exp(-np.clip(logits.astype(np.float64), -700, None)))
    return probabilities


def convert(vectors: Vectors, dtype: EmbedDtype, param: str = "embed_dtype") -> Values:
    """The values of each row in an element type; bfloat16 as uint16 bit patterns, packed types as bytes.

    Raises ``InvalidInput`` naming ``param``, the client's word for the type, for a value beyond its range.
    """
    if (largest := LARGEST.get(dtype.value)) is not None:
        check_range(vectors, largest, dtype.value, param)
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
            packed = np.packbits(vectors > 0, axis=1)
            return packed if dtype is EmbedDtype.UBINARY else (packed ^ 0x80).view(np.int8)


# Of a number in JSON at most, with its comma: float32 has nine digits, a sign, a point and an exponent.
_CHARACTERS: Final = {
    EmbedDtype.INT8: 5,
    EmbedDtype.UINT8: 4,
    EmbedDtype.BINARY: 5,
    EmbedDtype.UBINARY: 4,
}
_FLOAT_CHARACTERS: Final = 16
_SIZES: Final = {EmbedDtype.FLOAT32: 4, EmbedDtype.FLOAT16: 2, EmbedDtype.BFLOAT16: 2}
# Of what stands around the rows of an input: keys, the place, a shape.
_FRAME_BYTES: Final = 96
# Of what stands around a row among others.
_ROW_BYTES: Final = 3


def row_bytes(width: int, dtype: EmbedDtype, encoding: EncodingFormat) -> int:
    """What a row of so many values takes in an answer, at most, without what stands around an input's."""
    count = -(-width // 8) if dtype in (EmbedDtype.BINARY, EmbedDtype.UBINARY) else width
    nbytes = count * _SIZES.get(dtype, 1)
    match encoding:
        case EncodingFormat.BYTES | EncodingFormat.BYTES_ONLY:
            return nbytes
        case EncodingFormat.BASE64:
            return -(-nbytes // 3) * 4
        case EncodingFormat.FLOAT:
            return _ROW_BYTES + count * _CHARACTERS.get(dtype, _FLOAT_CHARACTERS)


def frame_bytes(encoding: EncodingFormat) -> int:
    """What stands around an input's rows, at most."""
    return _FRAME_BYTES if encoding in (EncodingFormat.FLOAT, EncodingFormat.BASE64) else 0


def numbers(values: Values, dtype: EmbedDtype) -> Values:
    """Converted values as an array that JSON can hold."""
    return from_bfloat16_bits(values) if dtype is EmbedDtype.BFLOAT16 else values


class Long(msgspec.Struct, frozen=True):
    """A long part of JSON, written in ``pieces``."""

    pieces: Sequence[bytes]


# In JSON it stands nowhere else: control characters are escaped.
_PLACE: Final = b"\0"


def json_content(value: Any) -> Content:
    """JSON of what may hold numpy arrays, in pieces where it holds a ``Long`` part.

    A page of 17 MB in base64 took the interpreter's lock for 16 ms as a string that the encoder copied.
    """
    long: list[Long] = []
    text = orjson.dumps(value, default=partial(_place, long), option=orjson.OPT_SERIALIZE_NUMPY)
    return _spliced(text, long) if long else text


def _place(long: list[Long], part: object) -> orjson.Fragment:
    if not isinstance(part, Long):
        raise TypeError(type(part).__name__)
    long.append(part)
    return orjson.Fragment(_PLACE)


def _spliced(text: bytes, long: Sequence[Long]) -> tuple[bytes, ...]:
    pieces: list[bytes] = []
    *before, last = text.split(_PLACE)
    for around, part in zip(before, long, strict=True):
        pieces += (around, *part.pieces)
    return (*pieces, last)


# What is encoded at a time, in threes of bytes: a piece has 1 MiB. Shorter values are strings.
_ENCODED_BYTES: Final = 3 << 18


def base64_rows(values: Values) -> list[str | Long]:
    """Each row's bytes in base64; ``values`` are contiguous."""
    return [base64_text(row) for row in values]


def base64_text(values: Values) -> str | Long:
    """The bytes of contiguous values in base64."""
    if values.nbytes <= _ENCODED_BYTES:
        return pybase64.b64encode_as_string(values.data)
    data = values.reshape(-1).view(np.uint8).data
    starts = range(0, len(data), _ENCODED_BYTES)
    return Long([b'"', *[pybase64.b64encode(data[at : at + _ENCODED_BYTES]) for at in starts], b'"'])


def matrices(values: Values, bounds: npt.NDArray[np.int64]) -> list[Values]:
    """The rows of each input, ``[rows, width]``; ``bounds``, int64 ``[inputs + 1]``, says which they are."""
    return [values[first:last] for first, last in pairwise(bounds.tolist())]


# Numbers that are made to text in one go: 2 ms, for which nothing else of this process runs. 8,191 vectors of
# 2048 numbers take 0.5 s at once.
_BLOCK: Final = 1 << 16


def json_list(entries: Sequence[Any], width: int) -> Sequence[Any] | Long:
    """A list of entries with ``width`` numbers each, for JSON: in blocks where there are many."""
    step = max(1, _BLOCK // max(1, width))
    return entries if len(entries) <= step else _in_blocks(entries, step)


def json_matrix(values: Values) -> orjson.Fragment | Long:
    """A matrix, or a row, as JSON, block by block: a page of 1802 x 3072 numbers takes 0.2 s at once."""
    rows = max(1, _BLOCK // max(1, values[:1].size))
    if len(values) > rows:
        return _in_blocks(values, rows)
    return orjson.Fragment(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))


def _in_blocks(entries: Sequence[Any] | Values, step: int) -> Long:
    pieces: list[bytes] = []
    for first in range(0, len(entries), step):
        block = json_content(entries[first : first + step])
        within = list(block) if isinstance(block, tuple) else [bytes(block)]
        within[0] = (b"," if first else b"[") + within[0][1:]
        within[-1] = within[-1][:-1]
        pieces += within
    return Long([*pieces, b"]"])
