"""The safetensors container: eight bytes of header length, a JSON header, then the tensors' bytes.

Only the header is interpreted here, so that nothing needs torch; and nothing in the format can run code.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.dtypes import BY_SAFETENSORS
from tessera.errors import CheckpointError

_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor's row-major, little-endian bytes lie; ``start`` counts from the file's beginning."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file's header, checked against its size."""

    path: Path
    header: bytes
    tensors: tuple[StoredTensor, ...]

    @classmethod
    def read(cls, path: Path) -> WeightFile:
        """Read the header of ``path``; raises ``CheckpointError`` for anything that is not as it says."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                    raise CheckpointError(f"{path}: not a safetensors file, or cut short: {size} bytes")
                header = file.read(length)
            parsed = json.loads(header)
        except OSError as error:
            raise CheckpointError(f"{path}: not readable: {error}") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: its safetensors header is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise CheckpointError(f"{path}: its safetensors header is no JSON object")
        data = 8 + length
        tensors = tuple(
            _tensor(path, name, entry, data=data, size=size)
            for name, entry in parsed.items()
            if name != "__metadata__"
        )
        return cls(path=path, header=header, tensors=tensors)


def _tensor(path: Path, name: str, entry: Any, *, data: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name!r} has no dtype, shape and data_offsets") from error
    if not numbers or dtype not in BY_SAFETENSORS:
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed header entry {entry!r}")
    expected = math.prod(shape) * BY_SAFETENSORS[dtype].itemsize
    if end - start != expected or data + end > size:
        raise CheckpointError(
            f"{path}: tensor {name!r} of {dtype} {list(shape)} needs {expected} bytes;"
            f" its header says {start}..{end} of {size - data}"
        )
    return StoredTensor(name=name, file=path, dtype=dtype, shape=shape, start=data + start, nbytes=expected)
