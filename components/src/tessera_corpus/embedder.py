"""Declares what makes vectors of items: engines of this command, or a service."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Protocol

import msgspec

from tessera.local.content import Content
from tessera.local.model_info import ModelInfo, OutputInfo
from tessera.local.options import VectorOptions
from tessera.local.usage import Usage
from tessera.models.base import OutputKind, Role, Truncate
from tessera.settings import NOT_NEGATIVE, Setting
from tessera_corpus.item import Embedded, Failure, Item


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
        Role,
        Setting(
            flag="--input-type",
            help="the role of items that have none of their own; it decides the prompt's prefix",
        ),
    ] = Role.PASSAGE
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
            help="an item with more tokens than the model takes is an error (none), or loses its start or "
            "its end",
        ),
    ] = Cut.NONE
    max_tokens: Annotated[
        int,
        Setting(flag="--max-tokens", check=NOT_NEGATIVE, help="tokens of one item; 0: the model's own limit"),
    ] = 0
    outputs: Annotated[
        str,
        Setting(
            flag="--outputs",
            metavar="NAME,...",
            help="which of the model's outputs an item becomes, a column for each: dense, sparse, "
            "multivector, as far as it has them; the model's first by default",
        ),
    ] = ""

    def asked(self, model: ModelInfo) -> tuple[OutputInfo, ...]:
        """Return the outputs that an item becomes, in the model's order.

        Raises ``InvalidInput`` for one that the model does not have.
        """
        names = [name for word in self.outputs.split(",") if (name := word.strip())]
        found = model.asked(names, "--outputs")
        return tuple([output for output in model.outputs if output in found])

    def names(self, model: ModelInfo) -> tuple[str, ...]:
        """Return what outputs are to be asked for by name: none where a vector is all that is wanted."""
        asked = self.asked(model)
        default = asked == model.outputs[:1] and asked[0].kind is not OutputKind.SPARSE
        return () if default else tuple([output.name for output in asked])

    @property
    def options(self) -> VectorOptions:
        """What of these an engine is started with; each item brings its role."""
        return VectorOptions(
            dimensions=self.dimensions,
            dimensions_param="--dimensions",
            max_tokens=self.max_tokens,
            truncate=self.truncate.truncate,
        )

    def content_of(self, item: Item) -> Content:
        """Return what is embedded of an item."""
        role = item.role or self.input_type
        return Content(parts=item.parts, role=role, instruction=item.instruction)


class Embedder(Protocol):
    """Called several times at once from one event loop; ``engines`` work side by side."""

    @property
    def served(self) -> ModelInfo: ...

    @property
    def engines(self) -> int: ...

    async def ready(self) -> None:
        """Wait until items can be embedded; raises ``TesseraError``. Without it the first ones wait."""
        ...

    async def embed(self, items: Sequence[Item]) -> list[Embedded | Failure]:
        """One for each item, in their order. Raises ``TesseraError`` where no item can be embedded."""
        ...

    async def usage(self) -> Usage: ...

    async def close(self) -> None: ...
