"""Vision rows that a client computed itself, in a safetensors file.

The ``safetensors`` package is not used: without torch it needs a numpy type for every dtype, and bfloat16 has
none.

The file's first tensor holds the rows. A second one named ``image_grid_thw``, as Qwen's processors call it,
says where in the image they lie: int32 or int64 ``[3]`` or ``[1, 3]``, (t, h, w) in patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.checkpoint.safetensors import LENGTH_BYTES, Description, header_length, parse_header
from tessera.dtypes import FLOATS, DType, from_bfloat16_bits
from tessera.errors import InvalidInput, UnsupportedMedia

_STORED: Final = {dtype.safetensors: dtype for dtype in FLOATS.values()}
UNSAFE_SUFFIXES: Final = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
SUFFIX: Final = ".safetensors"
GRID: Final = "image_grid_thw"
MAX_SIDE: Final = 1 << 20
"""Beyond the sides, in patches, of any image or video that there is."""

_WHOLE: Final[dict[str, np.dtype[np.signedinteger]]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}

_MAX_HEADER_BYTES: Final = 1 << 20
_MAX_DIMENSIONS: Final = 8
_MAX_NUMBER: Final = 1 << 48
_LARGEST: Final = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEmbeddings:
    """``data`` holds ``[rows, row_width]`` of ``dtype``; ``digest`` is the blake3 hash of the whole file.

    ``grid`` is what the client said of it, unchecked but for three positive numbers.
    """

    data: bytes
    shape: tuple[int, int]
    dtype: str
    digest: bytes
    grid: tuple[int, int, int] | None = None


def read_embeddings(
    data: bytes,
    *,
    row_width: int,
    digest: bytes,
    grid: tuple[int, int, int] | None = None,
    param: str,
) -> LoadedEmbeddings:
    """The first tensor, ``[rows, row_width]`` or ``[1, rows, row_width]``; ``grid`` came beside the file.

    Raises ``InvalidInput`` naming ``param`` for a malformed file, another shape or width, and values that
    are not finite or lie beyond float16's range; ``UnsupportedMedia`` for another dtype.
    """
    tensors = _tensors(data, param)
    stored_grid = tensors.pop(GRID, None)
    name, tensor = next(iter(tensors.items()), (None, None))
    if name is None or tensor is None:
        raise InvalidInput.at(param, "the safetensors file holds no tensor of rows")
    kind, shape = _STORED.get(tensor.dtype), tensor.shape
    if kind is None:
        raise UnsupportedMedia.at(
            param, f"the tensor's dtype {tensor.dtype[:16]!r} is none of {', '.join(_STORED)}"
        )
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or shape[0] < 1 or shape[1] != row_width:
        raise InvalidInput.at(
            param,
            f"expected a tensor [tokens, {row_width}] or [1, tokens, {row_width}], "
            f"found {list(shape)} in {name[:40]!r}",
        )
    values = _values(data, tensor, kind.itemsize, param)
    check_values(_numbers(values, kind), "the tensor holds", param)
    if grid is None and stored_grid is not None:
        grid = _grid(data, stored_grid, param)
    return LoadedEmbeddings(
        data=values, shape=(shape[0], row_width), dtype=kind.name, digest=digest, grid=grid
    )


def _values(data: bytes, tensor: Description, itemsize: int, param: str) -> bytes:
    base = LENGTH_BYTES + header_length(data)
    values = data[base + tensor.start : base + tensor.stop]
    if len(values) != prod(tensor.shape) * itemsize or tensor.stop - tensor.start != len(values):
        raise InvalidInput.at(param, "the tensor's offsets do not fit its shape or the file")
    return values


def _grid(data: bytes, tensor: Description, param: str) -> tuple[int, int, int]:
    kind = _WHOLE.get(tensor.dtype)
    if kind is None or tensor.shape not in ((3,), (1, 3)):
        raise InvalidInput.at(
            param,
            f"expected {GRID} as int32 or int64 [3] or [1, 3], "
            f"found {tensor.dtype[:16]} {list(tensor.shape)}",
        )
    t, h, w = np.frombuffer(_values(data, tensor, kind.itemsize, param), kind).tolist()
    if not all(0 < side < MAX_SIDE for side in (t, h, w)):
        raise InvalidInput.at(param, f"expected positive numbers in {GRID}, found {[t, h, w]}")
    return t, h, w


def _tensors(data: bytes, param: str) -> dict[str, Description]:
    """The rows and the grid, as far as they are there; the numbers of what they say are bounded."""
    length = header_length(data)
    after = len(data) - LENGTH_BYTES
    if after < 1 or length > min(after, _MAX_HEADER_BYTES):
        raise InvalidInput.at(param, "not a safetensors file, or its header is too long")
    try:
        entries = parse_header(data[LENGTH_BYTES : LENGTH_BYTES + length])
    except ValueError:
        raise InvalidInput.at(param, "the safetensors header is not valid JSON") from None
    except TypeError:
        entries = {}
    found = [name for name, entry in entries.items() if isinstance(entry, dict)]
    if not found:
        raise InvalidInput.at(param, "the safetensors file holds no tensor")
    rows = next((name for name in found if name != GRID), None)
    return {name: _described(entries[name], param) for name in (rows, GRID) if name in found}


def _described(entry: object, param: str) -> Description:
    try:
        tensor = Description.of(entry)
        if (
            len(tensor.shape) > _MAX_DIMENSIONS
            or max(*tensor.shape, tensor.stop, tensor.start) >= _MAX_NUMBER
        ):
            raise ValueError("has a malformed header entry")
    except ValueError:
        raise InvalidInput.at(param, "the safetensors header describes no tensor") from None
    return tensor


def _numbers(values: bytes, kind: DType) -> npt.NDArray[Any]:
    if kind.numpy is None:
        return from_bfloat16_bits(np.frombuffer(values, "<u2"))
    return np.frombuffer(values, kind.numpy)


def check_values(values: npt.NDArray[Any], what: str, param: str) -> None:
    """Raise ``InvalidInput`` for what float16 does not hold, so that no engine's type makes it infinite."""
    # A comparison with a NaN is false.
    if not (np.abs(values) <= _LARGEST).all():
        raise InvalidInput.at(param, f"{what} values that are not finite or beyond {_LARGEST:g}")
