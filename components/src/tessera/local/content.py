"""Holds the ordered parts of one input, texts and images, with what they are for."""

from __future__ import annotations

import msgspec

from tessera.models.base import Role


class ImageFile(msgspec.Struct, frozen=True):
    """An encoded image file."""

    data: bytes


Part = str | ImageFile


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """One input: its texts and images, in the order in which they are read as one.

    ``role`` is what it is for; an image without one is a passage, as at the service. ``instruction`` is what
    its prompt says in place of the model's own, where the family knows them.
    """

    parts: tuple[Part, ...]
    role: Role = Role.NONE
    instruction: str | None = None

    def __post_init__(self) -> None:
        if self.role is Role.NONE and any(isinstance(part, ImageFile) for part in self.parts):
            msgspec.structs.force_setattr(self, "role", Role.PASSAGE)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its images, and one for each character of its texts."""
        return nbytes_of(self.parts)


def nbytes_of(parts: tuple[Part, ...]) -> int:
    """Return the bytes of images, and one for each character of texts."""
    return sum(len(part if isinstance(part, str) else part.data) for part in parts)
