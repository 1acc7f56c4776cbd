"""How far a source has been read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a source has been read, in what it counts itself in: files or bytes. ``most`` 0 is unknown."""

    read: int
    most: int = 0
