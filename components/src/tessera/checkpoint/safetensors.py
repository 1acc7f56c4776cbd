"""The safetensors format: eight bytes of header length, a JSON header, then the tensors' bytes.

Only headers are read here. They need no torch, so that the frontend can read them too, and
nothing in the format can run code. The ``safetensors`` package reads tensors by mapping the file; see
``checkpoint.loading`` for what that costs.
"""

from __future__ import annotations

import math
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from tessera.dtypes import BY_SAFETENSORS, FLOATS, DType
from tessera.errors import CheckpointError
from tessera.file_kinds import kind_of

LENGTH_BYTES: Final = 8
"""What the header's length takes at the beginning of a file."""

_LOOKED_AT: Final = 4096
_LARGEST_HEADER: Final = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One tensor as a header describes it; ``start`` and ``stop`` count from the end of the header.

    The values have the right types and none is negative. Whether they fit one another and the file is the
    caller's to check.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def of(cls, entry: Any) -> Description:
        """Read a header's entry; raises ``ValueError`` with a short reason."""
        try:
            dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("has no dtype, shape and data_offsets") from error
        numbers = (*shape, start, stop)
        if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"has a malformed header entry {entry!r}")
        return cls(dtype=dtype, shape=shape, start=start, stop=stop)


def header_length(data: bytes) -> int:
    """The length that the first eight bytes of a file announce."""
    return int.from_bytes(data[:LENGTH_BYTES], "little")


def parse_header(header: bytes) -> dict[str, Any]:
    """The entries of a header by tensor name, unchecked.

    Raises ``ValueError`` for what is not JSON and ``TypeError`` for JSON that is no object.
    """
    parsed = orjson.loads(header)
    if not isinstance(parsed, dict):
        raise TypeError(f"a header is a JSON object, not {type(parsed).__name__}")
    parsed.pop("__metadata__", None)
    return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor's row-major, little-endian bytes lie; ``start`` counts from the file's beginning.

    With ``first`` it is a part of the tensor ``name``: so many rows as ``shape`` says, from that one on.
    ``scales`` are those of quantised values, whose ``shape`` is that of the weights. ``added`` is what an
    adapter adds to the whole tensor.
    """

    name: str
    file: Path
    dtype: DType
    shape: tuple[int, ...]
    start: int
    nbytes: int
    first: int | None = None
    scales: Scales | None = None
    added: LowRank | None = None

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def in_fp8(self) -> bool:
        """Whether an FP8 product can read the values as they are.

        They are E4M3 with a scale for each row or for all, nothing is added to them, and what they are
        multiplied with is to be rounded to FP8 as well.
        """
        scales = self.scales
        if scales is None or self.added is not None or self.first is not None or not scales.rounds_inputs:
            return False
        by_row = scales.block[1] == self.shape[1] and scales.block[0] in (1, self.shape[0])
        floats = self.dtype.name == "float8" and scales.of_blocks.dtype.name in FLOATS
        return floats and by_row and scales.overall is None

    def row(self, number: int) -> StoredTensor:
        """Return one row of a matrix, ``[1, width]``."""
        nbytes = self.nbytes // self.shape[0]
        start, shape = self.start + number * nbytes, (1, *self.shape[1:])
        return replace(self, shape=shape, start=start, nbytes=nbytes, first=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """What a quantised tensor's values are multiplied by.

    Each ``block`` of so many rows and columns has its own of ``of_blocks``; one of uint8 is an exponent of 2,
    biased by 127 (E8M0). ``overall`` is of all values, which are divided by it if it ``divides``. With
    ``packed`` each byte is two values of four bits (E2M1), the first in its lower half. With
    ``rounds_inputs`` products with the tensor were calibrated with inputs in the values' type: ``of_inputs``
    is the one scale of these, or else each of their rows has its own.
    """

    of_blocks: StoredTensor
    block: tuple[int, int]
    overall: StoredTensor | None = None
    divides: bool = False
    packed: bool = False
    rounds_inputs: bool = False
    of_inputs: StoredTensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """An addition to a tensor: ``scale`` times the product of ``b`` and ``a``, or ``b`` without an ``a``.

    With ``turned`` the product is transposed. ``magnitude`` is the length that each row then gets (DoRA).
    """

    b: StoredTensor
    scale: float
    a: StoredTensor | None = None
    turned: bool = False
    magnitude: StoredTensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file's header, checked against its size."""

    path: Path
    header: bytes
    tensors: tuple[StoredTensor, ...]

    @classmethod
    def read(cls, path: Path) -> WeightFile:
        """Read the header of ``path``; raises ``CheckpointError`` for anything that is not as it says."""
        size = regular_size(path)
        try:
            with path.open("rb") as file:
                length = header_length(start := file.read(LENGTH_BYTES))
                if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, _LARGEST_HEADER):
                    if (kind := kind_of(start + file.read(_LOOKED_AT))) is not None:
                        raise CheckpointError(f"{path}: is {kind}, not a safetensors file")
                    raise CheckpointError(f"{path}: not a safetensors file, or cut short: {size} bytes")
                header = file.read(length)
            entries = parse_header(header)
        except OSError as error:
            raise CheckpointError(f"{path}: not readable: {error}") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: its safetensors header is not JSON: {error}") from error
        except TypeError as error:
            raise CheckpointError(f"{path}: its safetensors header is no JSON object") from error
        data = LENGTH_BYTES + length
        tensors = tuple(_tensor(path, name, entry, data=data, size=size) for name, entry in entries.items())
        return cls(path=path, header=header, tensors=tensors)


def regular_size(path: Path) -> int:
    """The bytes of a file of weights; raises ``CheckpointError`` for one that is no regular file.

    A FIFO would be waited for without end.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is no regular file")
    return status.st_size


def _tensor(path: Path, name: str, entry: Any, *, data: int, size: int) -> StoredTensor:
    try:
        found = Description.of(entry)
        if found.dtype not in BY_SAFETENSORS:
            raise ValueError(f"has a malformed header entry {entry!r}")
    except ValueError as error:
        raise CheckpointError(f"{path}: tensor {name!r} {error}") from error
    dtype, shape = BY_SAFETENSORS[found.dtype], found.shape
    expected = math.prod(shape) * dtype.itemsize
    if found.stop - found.start == expected and data + found.stop > size:
        raise CheckpointError(
            f"{path}: is cut short: it has {size} bytes, and tensor {name!r} ends at {data + found.stop}; run"
            " the download again"
        )
    if found.stop - found.start != expected:
        raise CheckpointError(
            f"{path}: tensor {name!r} of {found.dtype} {list(shape)} needs {expected} bytes;"
            f" its header says {found.start}..{found.stop} of {size - data}"
        )
    return StoredTensor(
        name=name, file=path, dtype=dtype, shape=shape, start=data + found.start, nbytes=expected
    )
