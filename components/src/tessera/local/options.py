"""Holds what changes vectors, beside the model and the inputs."""

from __future__ import annotations

import msgspec

from tessera.models.base import Truncate


class VectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an engine's vectors.

    ``dimensions`` is one of the widths that the model offers, 0 for its own; an error names it
    ``dimensions_param``, as the user does. ``max_tokens`` bounds an input, 0 for the model's own limit, and
    ``truncate`` says what becomes of a longer one.
    """

    dimensions: int = 0
    dimensions_param: str = "dimensions"
    max_tokens: int = 0
    truncate: Truncate = Truncate.NONE
