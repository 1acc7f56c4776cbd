"""Vision rows that a client computed itself, in a safetensors file.

The format is a little-endian 64-bit length, that many bytes of JSON, and the tensors' raw values; it is
read here because its library needs an array type for every dtype, and bfloat16 has none in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import orjson

from tessera.dtypes import FLOATS, DType, from_bfloat16_bits
from tessera.errors import InvalidInput, UnsupportedMedia

_STORED: Final = {dtype.safetensors: dtype for dtype in FLOATS.values()}
UNSAFE_SUFFIXES: Final = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
SUFFIX: Final = ".safetensors"

_MAX_HEADER_BYTES: Final = 1 << 20
_LARGEST: Final = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEmbeddings:
    """``data`` holds ``[rows, hidden]`` of ``dtype``; ``digest`` is the blake3 hash of the whole file."""

    data: bytes
    shape: tuple[int, int]
    dtype: str
    digest: bytes


def looks_like_safetensors(data: bytes) -> bool:
    """Whether the bytes begin as the format does, which no image format's do."""
    return len(data) > 8 and data[8:9] == b"{" and _header_bytes(data) <= min(len(data) - 8, 1 << 32)


def read_embeddings(data: bytes, *, hidden: int, digest: bytes, param: str) -> LoadedEmbeddings:
    """The first tensor, ``[rows, hidden]`` or ``[1, rows, hidden]``.

    Raises ``InvalidInput`` naming ``param`` for a malformed file, another shape or width, and values that
    are not finite or lie beyond float16's range; ``UnsupportedMedia`` for another dtype.
    """
    name, tensor = _first(data, param)
    dtype, shape, start, stop = _described(tensor, param)
    if dtype not in _STORED:
        raise UnsupportedMedia(
            f"{param}: the tensor's dtype {dtype[:16]!r} is none of {', '.join(_STORED)}", param=param
        )
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or shape[0] < 1 or shape[1] != hidden:
        raise InvalidInput(
            f"{param}: expected a tensor [tokens, {hidden}] or [1, tokens, {hidden}], "
            f"found {shape[:8]} in {name[:40]!r}",
            param=param,
        )
    kind = _STORED[dtype]
    values = data[8 + _header_bytes(data) :][start:stop]
    if len(values) != prod(shape) * kind.itemsize or stop - start != len(values):
        raise InvalidInput(f"{param}: the tensor's offsets do not fit its shape or the file", param=param)
    if not _in_range(values, kind):
        raise InvalidInput(
            f"{param}: the tensor holds values that are not finite or beyond {_LARGEST:g}", param=param
        )
    return LoadedEmbeddings(data=values, shape=(shape[0], hidden), dtype=kind.name, digest=digest)


def _header_bytes(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _first(data: bytes, param: str) -> tuple[str, dict[str, Any]]:
    length = _header_bytes(data)
    if len(data) < 9 or length > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise InvalidInput(f"{param}: not a safetensors file, or its header is too long", param=param)
    try:
        header = orjson.loads(data[8 : 8 + length])
    except orjson.JSONDecodeError:
        raise InvalidInput(f"{param}: the safetensors header is not valid JSON", param=param) from None
    if isinstance(header, dict):
        for name, tensor in header.items():
            if name != "__metadata__" and isinstance(tensor, dict):
                return name, tensor
    raise InvalidInput(f"{param}: the safetensors file holds no tensor", param=param)


def _described(tensor: dict[str, Any], param: str) -> tuple[str, list[int], int, int]:
    dtype, shape, offsets = (tensor.get(key) for key in ("dtype", "shape", "data_offsets"))
    whole = [
        value
        for values in (shape, offsets)
        if isinstance(values, list) and len(values) <= 8
        for value in values
    ]
    if (
        not isinstance(dtype, str)
        or not isinstance(shape, list)
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or len(whole) != len(shape) + 2
        or not all(type(value) is int and 0 <= value < 1 << 48 for value in whole)
    ):
        raise InvalidInput(f"{param}: the safetensors header describes no tensor", param=param)
    return dtype, shape, offsets[0], offsets[1]


def _in_range(values: bytes, kind: DType) -> bool:
    if kind.numpy is None:
        found = from_bfloat16_bits(np.frombuffer(values, "<u2"))
    else:
        found = np.frombuffer(values, kind.numpy)
    # A comparison with a NaN is false.
    return bool((np.abs(found) <= _LARGEST).all())
