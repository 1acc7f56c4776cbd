"""The text engine of a worker that has none."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from tessera.engine.batch import Cost, TextBatch, packed_cost
from tessera.errors import EngineFailed


class NoText:
    """Implements ``TextEngine``: it loads nothing, and fails what it is given."""

    cost: Cost = staticmethod(packed_cost)
    depth = 1
    gives: Collection[str] = ()

    def warm(self) -> None:
        """There is nothing to warm."""

    def launch(self, batch: TextBatch) -> NoReturn:
        """Raise ``EngineFailed``."""
        raise EngineFailed("this worker encodes images alone; it has no text engine")

    launch_named = launch

    def close(self) -> None:
        """There is nothing to close."""
