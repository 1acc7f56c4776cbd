"""What an output is made of: rows, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy.typing as npt

from tessera.frontend.api.formats import convert
from tessera.frontend.request import EmbedDtype
from tessera.models.base import Role
from tessera_corpus.item import Embedded
from tessera_corpus.output.settings import ElementType

# To look one up by Enum's own call took a tenth of what writing a row takes.
_ELEMENTS: Final = {kind.value: kind for kind in EmbedDtype}


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorKind:
    """What all vectors of an output have in common.

    ``tokens`` says that an item has a vector for each of its tokens. ``role`` is that of items which name
    none. ``options`` are all further ones that change vectors. ``model`` is a name; the ``fingerprint`` says
    what the model is.
    """

    model: str
    fingerprint: str
    width: int
    tokens: bool
    dtype: ElementType
    role: Role | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def differences(self, other: Self) -> list[str]:
        """What would make its vectors others, as ``width 512, not 2048``; a model's name would not."""
        named = [
            (name, getattr(self, name), getattr(other, name))
            for name in ("fingerprint", "width", "tokens", "dtype", "role")
        ]
        options = sorted({*self.options, *other.options})
        named += [(name, self.options.get(name), other.options.get(name)) for name in options]
        found = [f"{name} {_said(own)}, not {_said(its)}" for name, own, its in named if own != its]
        if self.fingerprint != other.fingerprint:
            found.insert(0, f"model {self.model}, not {other.model}")
        return found


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """An item with its vectors, ``[rows, width]`` in the element type of the output."""

    id: str
    source: str
    page: int | None
    place: int | None
    content_hash: bytes
    warning: str | None = None
    values: npt.NDArray[Any]
    tokens: int

    @classmethod
    def of(cls, embedded: Embedded, kind: VectorKind) -> Self:
        """Raises ``ValueError`` for vectors that are not of this kind."""
        shape = embedded.rows.shape
        if len(shape) != 2 or shape[1] != kind.width or not (shape[0] == 1 or (kind.tokens and shape[0])):
            raise ValueError(f"{embedded.id}: vectors of shape {shape} among those of width {kind.width}")
        return cls(
            id=embedded.id,
            source=embedded.source,
            page=embedded.page,
            place=embedded.place,
            content_hash=embedded.content_hash,
            warning=embedded.warning,
            values=convert(embedded.rows, _ELEMENTS[kind.dtype]),
            tokens=embedded.tokens,
        )
