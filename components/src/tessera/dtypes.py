"""The one table of element types: what each is called here, in safetensors, in numpy and in torch.

Everything that stores or carries numbers looks a type up here. Importing the table needs no torch: the
frontend has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Float32Array = npt.NDArray[np.float32]
UInt16Array = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type of ``itemsize`` bytes.

    ``name`` is used in flags, manifests, handles and messages. ``numpy`` is the little-endian type string,
    None where numpy has no such type. ``torch_name`` is the attribute of the torch module.
    """

    name: str
    itemsize: int
    safetensors: str
    numpy: str | None
    torch_name: str

    @property
    def torch(self) -> torch.dtype:
        """The torch type; imports torch."""
        import torch

        dtype = getattr(torch, self.torch_name)
        assert isinstance(dtype, torch.dtype)
        return dtype


_TABLE: Final = (
    DType("float32", 4, "F32", "<f4", "float32"),
    DType("float16", 2, "F16", "<f2", "float16"),
    DType("bfloat16", 2, "BF16", None, "bfloat16"),
    DType("float64", 8, "F64", "<f8", "float64"),
    DType("float8", 1, "F8_E4M3", None, "float8_e4m3fn"),
    DType("float8_e5m2", 1, "F8_E5M2", None, "float8_e5m2"),
    DType("float8_e8m0", 1, "F8_E8M0", None, "float8_e8m0fnu"),
    DType("bool", 1, "BOOL", "|b1", "bool"),
    DType("uint8", 1, "U8", "|u1", "uint8"),
    DType("int8", 1, "I8", "|i1", "int8"),
    DType("uint16", 2, "U16", "<u2", "uint16"),
    DType("int16", 2, "I16", "<i2", "int16"),
    DType("uint32", 4, "U32", "<u4", "uint32"),
    DType("int32", 4, "I32", "<i4", "int32"),
    DType("uint64", 8, "U64", "<u8", "uint64"),
    DType("int64", 8, "I64", "<i8", "int64"),
)

DTYPES: Final[Mapping[str, DType]] = MappingProxyType({dtype.name: dtype for dtype in _TABLE})
"""Every type by its name here."""

BY_SAFETENSORS: Final[Mapping[str, DType]] = MappingProxyType({dtype.safetensors: dtype for dtype in _TABLE})
"""Every type by its name in safetensors files."""

FLOATS: Final[Mapping[str, DType]] = MappingProxyType(
    {name: DTYPES[name] for name in ("float32", "float16", "bfloat16")}
)
"""The types that weights are stored in, that modules compute in and that vision rows have."""


def dtype_of(dtype: torch.dtype) -> DType:
    """The entry of a torch type; ``KeyError`` for a type that is not in the table."""
    name = str(dtype).removeprefix("torch.")
    for entry in _TABLE:
        if entry.torch_name == name:
            return entry
    raise KeyError(name)


def bfloat16_bits(values: Float32Array) -> UInt16Array:
    """float32 values rounded to bfloat16, half to even, as bit patterns of the same shape."""
    bits = values.view("<u4")
    rounded: UInt16Array = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype("<u2")
    return rounded


def from_bfloat16_bits(bits: UInt16Array) -> Float32Array:
    """The float32 values of bfloat16 bit patterns, exactly: a bfloat16 is the upper half of a float32."""
    values: Float32Array = (bits.astype("<u4") << 16).view("<f4")
    return values
