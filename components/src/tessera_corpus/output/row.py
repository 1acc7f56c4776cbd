"""What an output is made of: rows, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from tessera.frontend.api.formats import convert
from tessera.frontend.request import EmbedDtype
from tessera.models.base import OutputKind, Role
from tessera_corpus.item import Embedded, Hashed
from tessera_corpus.output.settings import ElementType

CHANGED: Final = "whose files, options or version of Tessera are others now"
"""What is said of a model whose name is the same, while its fingerprint is not."""

# To look one up by Enum's own call took a tenth of what writing a row takes.
_ELEMENTS: Final = {kind.value: kind for kind in EmbedDtype}


VECTOR: Final = "vector"
"""The column of a model's first output, where that is a vector or one for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The rows of one of a model's outputs, which are ``width`` wide."""

    name: str
    kind: OutputKind
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorKind:
    """What all vectors of an output have in common.

    ``width`` is that of the column ``vector``, 0 where there is none, and ``tokens`` says that it has a
    vector for each of an item's tokens. ``others`` are the columns of further outputs of the model.
    ``role`` is that of items which name none. ``options`` are all further ones that change vectors.
    ``model`` is a name; the ``fingerprint`` says what the model is.
    """

    model: str
    fingerprint: str
    width: int
    tokens: bool
    dtype: ElementType
    role: Role | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    others: tuple[Column, ...] = ()

    @property
    def columns(self) -> tuple[Column, ...]:
        """All of them, in the order of the model's outputs."""
        if not self.width:
            return self.others
        kind = OutputKind.TOKENS if self.tokens else OutputKind.VECTOR
        return (Column(name=VECTOR, kind=kind, width=self.width), *self.others)

    def differences(self, other: Self) -> list[str]:
        """What would make its vectors others, as ``width 512, not 2048``; a model's name would not."""
        named = [
            (name, getattr(self, name), getattr(other, name))
            for name in ("fingerprint", "width", "tokens", "dtype", "role")
        ]
        own, others = [", ".join([column.name for column in kind.columns]) for kind in (self, other)]
        named.append(("columns", own, others))
        options = sorted({*self.options, *other.options})
        named += [(name, self.options.get(name), other.options.get(name)) for name in options]
        found = [f"{name} {_said(own)}, not {_said(its)}" for name, own, its in named if own != its]
        if self.fingerprint != other.fingerprint:
            its = f"not {other.model}" if self.model != other.model else CHANGED
            found.insert(0, f"model {self.model}, {its}")
        return found


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


class Row(Hashed, frozen=True, kw_only=True, eq=False):
    """An item with its rows in the columns of the output.

    ``values`` has those of each, ``[rows, width]`` in the element type of the output, of a sparse one in
    float32; ``ids`` are the token ids of a sparse one's rows, and None elsewhere.
    """

    values: tuple[npt.NDArray[Any], ...]
    ids: tuple[npt.NDArray[np.int32] | None, ...]
    tokens: int

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return sum([values.nbytes for values in self.values])

    @classmethod
    def of(cls, embedded: Embedded, kind: VectorKind) -> Self:
        """Raises ``ValueError`` for rows that are not of this kind."""
        given = embedded.rows.each()
        if len(given) != len(kind.columns):
            raise ValueError(f"{embedded.id}: {len(given)} outputs for {len(kind.columns)} columns")
        values = []
        for column, rows in zip(kind.columns, given, strict=True):
            count, width = rows.values.shape
            fits = {OutputKind.VECTOR: count == 1, OutputKind.TOKENS: count > 0}.get(column.kind, True)
            if width != column.width or not fits:
                raise ValueError(
                    f"{embedded.id}: vectors of shape {rows.values.shape} in the column {column.name}, "
                    f"which is {column.width} wide"
                )
            dtype = EmbedDtype.FLOAT32 if column.kind is OutputKind.SPARSE else _ELEMENTS[kind.dtype]
            values.append(convert(rows.values, dtype))
        return cls(
            **embedded.identity,
            values=tuple(values),
            ids=tuple(
                [
                    rows.indices if column.kind is OutputKind.SPARSE else None
                    for column, rows in zip(kind.columns, given, strict=True)
                ]
            ),
            tokens=embedded.tokens,
        )
