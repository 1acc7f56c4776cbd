"""Tensors of KServe v2: their datatypes, and values as clients send them and as they are sent back."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.dtypes import bfloat16_bits
from tessera.errors import InvalidInput
from tessera.frontend.api.formats import LARGEST, check_range
from tessera.frontend.api.values import Json, clip

BYTES: Final = "BYTES"
NUMPY: Final = {
    "BOOL": "|b1",
    "UINT8": "|u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "|i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    # Bit patterns: numpy has no such type.
    "BF16": "<u2",
}
"""How the values of each datatype but BYTES lie in memory, as numpy writes it."""

# Without a form in JSON or among typed contents.
_RAW_ONLY: Final = ("FP16", "BF16")
_ROUNDED: Final = {"FP16": "float16", "BF16": "bfloat16"}
_MOST_DIMENSIONS: Final = 8
_LENGTH: Final = struct.Struct("<I")
# As many strings as a body of JSON may have. 8 million objects would be freed in one piece: 0.1 s.
_MOST_ELEMENTS: Final = 600_000
# Kinds of numpy arrays that JSON's values may become, by the kind of the datatype.
_KINDS: Final = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}

Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """``values`` have ``shape``; those of BYTES are ``bytes`` objects."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values

    def raw(self) -> bytes:
        """Little-endian, row-major, without padding; of BYTES each behind its length."""
        if self.datatype != BYTES:
            return self.values.tobytes()
        return b"".join(_LENGTH.pack(len(each)) + each for each in self.values.ravel())

    @property
    def nbytes(self) -> int:
        """Of ``raw``."""
        if self.datatype != BYTES:
            return self.values.nbytes
        return sum(_LENGTH.size + len(each) for each in self.values.ravel())


def floats(name: str, values: npt.NDArray[np.float32], datatype: str) -> Tensor:
    """float32 values as FP32, or rounded to FP16 or BF16, to nearest even.

    Raises ``InvalidInput`` naming the output for a value that its datatype does not hold.
    """
    if datatype in _ROUNDED:
        check_range(values, LARGEST[_ROUNDED[datatype]], f"datatype {datatype}", name)
    shape = values.shape
    if datatype == "BF16":
        return Tensor(name=name, datatype=datatype, shape=shape, values=bfloat16_bits(values))
    return Tensor(name=name, datatype=datatype, shape=shape, values=values.astype(NUMPY[datatype]))


def check_head(name: str, datatype: str, shape: Sequence[Json]) -> tuple[int, ...]:
    """The shape of an input, without its values; raises ``InvalidInput`` naming it."""
    said = clip(name)
    if datatype != BYTES and datatype not in NUMPY:
        known = ", ".join((*NUMPY, BYTES))
        raise InvalidInput.at(said, f"the datatype {clip(datatype)!r} is none of {known}")
    if len(shape) > _MOST_DIMENSIONS:
        raise InvalidInput.at(said, f"a shape has {_MOST_DIMENSIONS} dimensions at most")
    sizes: list[int] = []
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 31:
            raise InvalidInput.at(
                said, f"{clip(repr(size))} is no size of a dimension, which is 0 to {(1 << 31) - 1}"
            )
        sizes.append(size)
    return tuple(sizes)


def of_raw(name: str, datatype: str, shape: Sequence[Json], raw: bytes | memoryview) -> Tensor:
    """A tensor out of raw contents, which it does not copy. Raises ``InvalidInput`` naming it."""
    sizes, said = check_head(name, datatype, shape), clip(name)
    if datatype == BYTES:
        if prod(sizes) > _MOST_ELEMENTS:
            raise InvalidInput.at(said, f"expected at most {_MOST_ELEMENTS} elements, not {prod(sizes)}")
        elements = iter(_elements(said, raw))
        found = list(islice(elements, min(prod(sizes), len(raw))))
        # Those that do not fit are counted alone.
        return _bytes_tensor(name, sizes, found, more=sum(1 for _ in elements))
    wanted = prod(sizes) * np.dtype(NUMPY[datatype]).itemsize
    if len(raw) != wanted:
        raise InvalidInput.at(
            said, f"{datatype} of shape {list(sizes)} takes {wanted} bytes, found {len(raw)}"
        )
    values: Values = np.frombuffer(raw, NUMPY[datatype]).reshape(sizes)
    return Tensor(name=name, datatype=datatype, shape=sizes, values=values)


def of_values(name: str, datatype: str, shape: Sequence[Json], data: Iterable[Any]) -> Tensor:
    """A tensor out of a list of numbers or of texts, flat or nested. Raises ``InvalidInput`` naming it."""
    sizes, said = check_head(name, datatype, shape), clip(name)
    if datatype in _RAW_ONLY:
        raise InvalidInput.at(said, f"{datatype} comes as raw or binary contents alone")
    if datatype == BYTES:
        found = [_bytes(said, each) for each in _flat(data)]
        return _bytes_tensor(name, sizes, found)
    try:
        given: Values = np.asarray(data)
    except (ValueError, OverflowError):
        given = np.empty(0, object)
    dtype = np.dtype(NUMPY[datatype])
    if given.size != prod(sizes):
        raise InvalidInput.at(said, f"shape {list(sizes)} takes {prod(sizes)} values, found {given.size}")
    if given.size and given.dtype.kind not in _KINDS[dtype.kind]:
        raise InvalidInput.at(said, f"the values are not all {datatype}")
    if given.size and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if int(given.min()) < limits.min or int(given.max()) > limits.max:
            raise InvalidInput.at(said, f"a value is out of the range of {datatype}")
    with np.errstate(over="ignore"):
        values = given.astype(dtype).reshape(sizes)
    return Tensor(name=name, datatype=datatype, shape=sizes, values=values)


def json_values(tensor: Tensor) -> Values | list[str]:
    """Flat values for JSON. Raises ``InvalidInput`` where they have no such form."""
    if tensor.datatype in _RAW_ONLY:
        raise InvalidInput.at(tensor.name, f"{tensor.datatype} has no form in JSON; ask for binary_data")
    if tensor.datatype == BYTES:
        return [each.decode("utf-8", "replace") for each in tensor.values.ravel()]
    return tensor.values.ravel()


def _bytes_tensor(name: str, sizes: tuple[int, ...], found: list[bytes], *, more: int = 0) -> Tensor:
    if (count := len(found) + more) != prod(sizes):
        said = clip(name)
        raise InvalidInput.at(said, f"shape {list(sizes)} takes {prod(sizes)} elements, found {count}")
    values = np.empty(len(found), object)
    values[:] = found
    return Tensor(name=name, datatype=BYTES, shape=sizes, values=values.reshape(sizes))


def _elements(said: str, raw: bytes | memoryview) -> Iterable[bytes]:
    at, end = 0, len(raw)
    while at < end:
        if end - at < _LENGTH.size:
            raise InvalidInput.at(said, "the length of an element is cut off")
        (size,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if size > end - at:
            raise InvalidInput.at(said, f"an element of {size} bytes has only {end - at}")
        yield bytes(raw[at : at + size])
        at += size


def _flat(data: Iterable[Any]) -> Iterable[Any]:
    left = [iter(data)]
    while left:
        for each in left[-1]:
            if isinstance(each, list):
                left.append(iter(each))
                break
            yield each
        else:
            left.pop()


def _bytes(said: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidInput.at(said, "the elements are not all texts")
    return value.encode()
