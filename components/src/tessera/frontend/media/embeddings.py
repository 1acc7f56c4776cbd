"""Vision rows that a client computed itself, in a safetensors file.

The ``safetensors`` package is not used: without torch it needs a numpy type for every dtype, and bfloat16 has
none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np

from tessera.checkpoint.safetensors import LENGTH_BYTES, Description, header_length, parse_header
from tessera.dtypes import FLOATS, DType, from_bfloat16_bits
from tessera.errors import InvalidInput, UnsupportedMedia

_STORED: Final = {dtype.safetensors: dtype for dtype in FLOATS.values()}
UNSAFE_SUFFIXES: Final = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
SUFFIX: Final = ".safetensors"

_MAX_HEADER_BYTES: Final = 1 << 20
_MAX_DIMENSIONS: Final = 8
_MAX_NUMBER: Final = 1 << 48
_LARGEST: Final = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEmbeddings:
    """``data`` holds ``[rows, hidden]`` of ``dtype``; ``digest`` is the blake3 hash of the whole file."""

    data: bytes
    shape: tuple[int, int]
    dtype: str
    digest: bytes


def read_embeddings(data: bytes, *, hidden: int, digest: bytes, param: str) -> LoadedEmbeddings:
    """The first tensor, ``[rows, hidden]`` or ``[1, rows, hidden]``.

    Raises ``InvalidInput`` naming ``param`` for a malformed file, another shape or width, and values that
    are not finite or lie beyond float16's range; ``UnsupportedMedia`` for another dtype.
    """
    name, tensor = _first(data, param)
    kind, shape = _STORED.get(tensor.dtype), tensor.shape
    if kind is None:
        raise UnsupportedMedia(
            f"{param}: the tensor's dtype {tensor.dtype[:16]!r} is none of {', '.join(_STORED)}", param=param
        )
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or shape[0] < 1 or shape[1] != hidden:
        raise InvalidInput(
            f"{param}: expected a tensor [tokens, {hidden}] or [1, tokens, {hidden}], "
            f"found {list(shape)} in {name[:40]!r}",
            param=param,
        )
    base = LENGTH_BYTES + header_length(data)
    values = data[base + tensor.start : base + tensor.stop]
    if len(values) != prod(shape) * kind.itemsize or tensor.stop - tensor.start != len(values):
        raise InvalidInput(f"{param}: the tensor's offsets do not fit its shape or the file", param=param)
    if not _in_range(values, kind):
        raise InvalidInput(
            f"{param}: the tensor holds values that are not finite or beyond {_LARGEST:g}", param=param
        )
    return LoadedEmbeddings(data=values, shape=(shape[0], hidden), dtype=kind.name, digest=digest)


def _first(data: bytes, param: str) -> tuple[str, Description]:
    """The name and the description of the first tensor; the numbers of what it says are bounded."""
    length = header_length(data)
    after = len(data) - LENGTH_BYTES
    if after < 1 or length > min(after, _MAX_HEADER_BYTES):
        raise InvalidInput(f"{param}: not a safetensors file, or its header is too long", param=param)
    try:
        entries = parse_header(data[LENGTH_BYTES : LENGTH_BYTES + length])
    except ValueError:
        raise InvalidInput(f"{param}: the safetensors header is not valid JSON", param=param) from None
    except TypeError:
        entries = {}
    name, entry = next(
        ((name, entry) for name, entry in entries.items() if isinstance(entry, dict)), (None, None)
    )
    if name is None:
        raise InvalidInput(f"{param}: the safetensors file holds no tensor", param=param)
    try:
        tensor = Description.of(entry)
        if (
            len(tensor.shape) > _MAX_DIMENSIONS
            or max(*tensor.shape, tensor.stop, tensor.start) >= _MAX_NUMBER
        ):
            raise ValueError("has a malformed header entry")
    except ValueError:
        raise InvalidInput(f"{param}: the safetensors header describes no tensor", param=param) from None
    return name, tensor


def _in_range(values: bytes, kind: DType) -> bool:
    if kind.numpy is None:
        found = from_bfloat16_bits(np.frombuffer(values, "<u2"))
    else:
        found = np.frombuffer(values, kind.numpy)
    # A comparison with a NaN is false.
    return bool((np.abs(found) <= _LARGEST).all())
