"""What makes vectors of items: an engine of this process, engines of its children, or a service."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Protocol

import msgspec

from tessera.corpus.item import Embedded, Failure, Item, Picture
from tessera.models.base import OutputKind, Role, Truncate
from tessera.settings import NOT_NEGATIVE, Setting


class InputType(StrEnum):
    """What items are for that do not say it themselves."""

    PASSAGE = "passage"
    QUERY = "query"
    NONE = "none"

    @property
    def role(self) -> Role:
        return Role(self.value)


class Cut(StrEnum):
    """What becomes of an item that is too long: a failure, or it loses its start or its end."""

    NONE = "none"
    START = "start"
    END = "end"

    @property
    def truncate(self) -> Truncate:
        return Truncate[self.name]


class VectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What changes vectors, beside the model."""

    input_type: Annotated[
        InputType,
        Setting(
            flag="--input-type",
            help="what items are for that do not say it themselves; decides the prompt's prefix",
        ),
    ] = InputType.PASSAGE
    dimensions: Annotated[
        int,
        Setting(
            flag="--dimensions",
            check=NOT_NEGATIVE,
            help="values of a vector, one of the widths that the model offers; 0: the model's own",
        ),
    ] = 0
    truncate: Annotated[
        Cut,
        Setting(
            flag="--truncate",
            help="what becomes of an item with more tokens than the model takes: an error row, or it loses "
            "its start or its end",
        ),
    ] = Cut.NONE
    max_tokens: Annotated[
        int, Setting(flag="--max-tokens", check=NOT_NEGATIVE, help="of one item; 0: the model's own limit")
    ] = 0

    def role_of(self, item: Item) -> Role:
        """An image without a role is a passage, as at the service."""
        role = item.role or self.input_type.role
        if role is Role.NONE and any(isinstance(part, Picture) for part in item.parts):
            return Role.PASSAGE
        return role


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The model that items are embedded with.

    ``fingerprint`` is of weights, preprocessing and prompts. ``width`` is that of the vectors which come out;
    ``checkpoint`` is ``random`` or ``demo`` for those that come with Tessera.
    """

    name: str
    fingerprint: str
    kind: OutputKind
    width: int
    images: bool
    checkpoint: str = ""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Since the start: seconds of engines at work, on all cards together, and lookups of images.

    Zeros where that is not known.
    """

    engine_seconds: float = 0.0
    images: int = 0
    cached_images: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            engine_seconds=self.engine_seconds + other.engine_seconds,
            images=self.images + other.images,
            cached_images=self.cached_images + other.cached_images,
        )


class Embedder(Protocol):
    """Called several times at once from one event loop; ``engines`` work side by side."""

    @property
    def served(self) -> Served: ...

    @property
    def engines(self) -> int: ...

    async def embed(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        """One for each item, in their order. Raises ``TesseraError`` where no item can be embedded."""
        ...

    async def usage(self) -> Usage: ...

    async def close(self) -> None: ...
