"""A slot: the rows of one result, from the moment they have a place until they are published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tessera.errors import HandOffError

if TYPE_CHECKING:
    from tessera.transport.slab.slab import Slab


class Slot:
    """Rows ``[rows, hidden]`` of the slab, owned by whoever acquired them until they are published.

    After ``free`` or after its lease has ended the memory belongs to others: drop every view of ``rows``.
    """

    __slots__ = ("_slab", "_state", "deadline", "lease", "rows", "unit", "units")

    def __init__(self, slab: Slab, lease: int, unit: int, units: int, rows: int) -> None:
        self._slab = slab
        self._state = "held"
        self.lease = lease
        self.unit = unit
        self.units = units
        self.deadline = 0.0
        first = unit * slab.geometry.unit_rows
        self.rows: torch.Tensor = slab.rows[first : first + rows]

    @property
    def held(self) -> bool:
        """Whether the slot is neither published nor freed."""
        return self._state == "held"

    @property
    def offset(self) -> int:
        """Bytes from the start of the slab."""
        return self.unit * self._slab.geometry.unit_bytes

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows.shape[0], self.rows.shape[1])

    @property
    def nbytes(self) -> int:
        return self.rows.shape[0] * self._slab.geometry.row_bytes

    @property
    def host_rows(self) -> torch.Tensor:
        """The same rows in host memory; current once ``Slab.stage`` has returned."""
        first = self.unit * self._slab.geometry.unit_rows
        return self._slab.host_rows[first : first + self.rows.shape[0]]

    def free(self) -> None:
        """Give the memory back without publishing it; does nothing to a published or freed slot."""
        if self._state == "held":
            self._state = "free"
            self._slab.take_back(self)

    def start_lease(self) -> None:
        """Let peers read the slot from now on; ``HandOffError`` when it was published or freed before."""
        if self._state != "held":
            raise HandOffError(f"a slot that is {self._state} cannot be published")
        self._state = "leased"
        self._slab.start_lease(self)
