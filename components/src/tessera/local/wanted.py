"""Says what is made of inputs: outputs of the model by name, or scores."""

from __future__ import annotations

import msgspec

from tessera.local.content import Content


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What each input becomes: the ``outputs`` that are named, without any the model's default.

    With a ``query`` it becomes its score for that in their place, one row of one value.
    """

    outputs: tuple[str, ...] = ()
    query: Content | None = None


DEFAULT = Wanted()
"""The model's default output."""
