"""Holds the ordered parts of one input, texts and images, with what they are for."""

from __future__ import annotations

import msgspec

from tessera.models.base import Role


class ImageFile(msgspec.Struct, frozen=True, tag=True):
    """An encoded image file."""

    data: bytes


class ImageURL(msgspec.Struct, frozen=True, tag=True):
    """A data, http or https URL of an image, which the engine's process reads."""

    url: str


Part = str | ImageFile


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """One input: its texts and images, in the order in which they are read as one.

    ``role`` is what it is for; an image without one is a passage, as at the service. ``instruction`` is what
    its prompt says in place of the model's own, where the family knows them. Errors call it ``param``;
    without a name, its texts ``text`` and its images ``image``.
    """

    parts: tuple[Part | ImageURL, ...]
    role: Role = Role.NONE
    instruction: str | None = None
    param: str = ""

    def __post_init__(self) -> None:
        if self.role is Role.NONE and not all(isinstance(part, str) for part in self.parts):
            msgspec.structs.force_setattr(self, "role", Role.PASSAGE)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its images, and one for each character of its texts."""
        return nbytes_of(self.parts)


def nbytes_of(parts: tuple[Part | ImageURL, ...]) -> int:
    """Return the bytes of images, and one for each character of texts and URLs."""
    return sum(len(part.data if isinstance(part, ImageFile) else _text_of(part)) for part in parts)


def _text_of(part: str | ImageURL) -> str:
    return part if isinstance(part, str) else part.url
