"""Says what the tensors of a model are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FLOATS: Final = ("FP32", "FP16", "BF16")
"""The datatypes that vectors may have, the first unless a call asks for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A tensor without its first dimension, the rows; -1 is any size.

    ``datatypes`` are all that an input may have, the first is announced. With ``flat`` it is a number for
    each row, whose shape has the rows alone. With ``several`` a row may have several such tensors, by one
    more dimension behind the rows. A call gets an ``optional`` output only if it asks for it.
    """

    name: str
    datatypes: tuple[str, ...]
    dims: tuple[int, ...]
    optional: bool = False
    flat: bool = False
    several: bool = False

    @property
    def datatype(self) -> str:
        return self.datatypes[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """As metadata says it."""
        return (-1,) if self.flat else (-1, *self.dims)
