"""What a region's memory is to those who read and write tensors there, whichever kind it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Lost(Exception):
    """The memory is not there any more, or not all of it; the message follows the region's name."""


class Memory(Protocol):
    """Goes back when nobody holds it any more: a copy that is under way outlives the region's name.

    ``place`` is what it is a part of, for messages, and ``identity`` equal for equal memory.
    """

    @property
    def described(self) -> Mapping[str, str | int]:
        """What a region says of it beside its name and size, by KServe's names."""
        ...

    @property
    def place(self) -> str: ...

    @property
    def identity(self) -> object: ...

    def place_bytes(self) -> int:
        """Return the size of the place."""
        ...

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Raises ``Lost``. The caller keeps within the region."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Raises ``Lost``. All of it has arrived when this returns. The caller keeps within the region."""
        ...
