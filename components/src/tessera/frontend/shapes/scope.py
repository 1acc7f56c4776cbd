"""What every wire form needs to know about the rest of the body while it reads one input."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tessera.errors import InvalidInput
from tessera.frontend.api.request import ImageSource, Input, RequestLimits
from tessera.frontend.shapes.roles import decide
from tessera.models.base import Role


class Modality(StrEnum):
    """What a client says an input is; NIM's values."""

    TEXT = "text"
    IMAGE = "image"
    TEXT_IMAGE = "text_image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The role that the body or the model's name asks for, and the limits."""

    role: Role | None
    limits: RequestLimits

    def text(self, text: str, param: str) -> str:
        if not text:
            raise InvalidInput(f"{param}: expected text, found an empty string", param=param)
        if len(text) > self.limits.characters:
            raise InvalidInput(
                f"{param}: expected at most {self.limits.characters} characters, found {len(text)}",
                param=param,
            )
        return text

    def fused(
        self, text: str, images: tuple[ImageSource, ...], param: str, *, stated: Role | None = None
    ) -> Input:
        """One input out of text, images or both; at least one must be there."""
        if not images:
            self.text(text, param)
        elif len(images) > self.limits.images_per_input:
            raise InvalidInput(
                f"{param}: expected at most {self.limits.images_per_input} images in one input, "
                f"found {len(images)}",
                param=param,
            )
        elif text:
            self.text(text, param)
        role = decide(stated, self.role, images=bool(images))
        return Input(text=text, images=images, role=role, param=param)


def check_modality(found: Input, modality: Modality | None) -> Input:
    """The input itself, if it is what the client said it is."""
    if modality is None:
        return found
    wants_image = modality is not Modality.TEXT
    wants_text = modality is not Modality.IMAGE
    if wants_text and not found.text:
        raise InvalidInput(
            f"{found.param}: the text part must be non-empty for modality {modality.value}", param=found.param
        )
    if not wants_text and found.text:
        raise InvalidInput(
            f"{found.param}: modality image expects an image alone, found text as well", param=found.param
        )
    if wants_image != bool(found.images):
        raise InvalidInput(
            f"{found.param}: modality {modality.value} expects {'an' if wants_image else 'no'} image, "
            f"found {len(found.images) or 'none'}",
            param=found.param,
        )
    return found
