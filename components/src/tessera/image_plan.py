"""What an image becomes, as every process speaks of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """What an image of some width and height becomes.

    ``units`` is what it costs the vision engine (tiles, or patches), ``rows`` the vision rows that come out,
    which is also the number of its placeholders. ``grid`` is (t, h, w) in patches, for families whose
    positions need it, else None. Rows that a client computed itself have 0 units and, unless it says so, no
    grid.
    """

    units: int
    rows: int
    grid: tuple[int, int, int] | None = None
