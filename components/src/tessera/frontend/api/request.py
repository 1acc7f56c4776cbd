"""The one request that every client's form is translated into: inputs, roles, limits, and how it is read.

Nothing here knows HTTP, JSON or a wire form; nothing that reads these types has to know which form the
client used. ``param`` is always the client's own path to the value (``input[3].content[0].image_url.url``).

The first line that applies decides:

==========================================  =========  ==============================================
what the request says                       role       why
==========================================  =========  ==============================================
message role ``query``                      QUERY      the most specific statement there is
message role ``document``, ``passage``      PASSAGE    likewise
``input_type`` (or ``task``) of the body    as named   NIM's and Cohere's way to say it
model name ending in ``-query``/-passage    as named   older NIM clients
input with an image                         PASSAGE    the checkpoint's own processor always does so
anything else                               NONE       raw text after BOS: vLLM's plain completion form
==========================================  =========  ==============================================

Message roles such as ``user`` say nothing about retrieval, so they fall through to the lines below.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from tessera.errors import InvalidInput
from tessera.frontend.api.values import Json, expected
from tessera.models.base import Role, Truncate
from tessera.settings import POSITIVE, Setting


class EncodingFormat(StrEnum):
    """How vectors are written: JSON numbers, base64 of raw little-endian values, or a raw body."""

    FLOAT = "float"
    BASE64 = "base64"
    BYTES = "bytes"


class EmbedDtype(StrEnum):
    """The element type of the vectors that are sent back."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    UINT8 = "uint8"
    BINARY = "binary"
    UBINARY = "ubinary"


BARE_BASE64: Final = "data:;base64,"
"""What a client's base64 gets before it when it came without the head of a data URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """Where an image is: a data, ``http``, ``https`` or ``file`` URL, or an absolute local path.

    Nothing has been fetched or checked yet. ``uuid`` is the client's own name for the content; it is a
    claim, so it must never be trusted across clients. With one, ``url`` may be empty: what was sent before.
    ``embeddings`` says that the client means a tensor of vision rows and not an image.
    """

    url: str
    param: str
    uuid: str | None = None
    embeddings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What becomes one vector: text or token ids, images, or text with images.

    Token ids come without images. An input with images may have empty text. ``malformed`` is why an input of
    a partial request could not be read; nothing else of it is meant then.
    """

    text: str | tuple[int, ...]
    images: tuple[ImageSource, ...] = ()
    role: Role
    param: str
    malformed: InvalidInput | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsRequest:
    """A request for vectors, one per input and in their order.

    ``model`` is the name without a role suffix, None when the client named none. ``dimensions`` is the
    wanted width, None for the model's own, and ``dimensions_param`` what the client calls it; ``max_tokens``
    bounds each input, None for the model's limit.
    ``normalize`` asks for unit vectors. ``partial`` asks for the good rows when some inputs fail.
    A smaller ``priority`` is more urgent.
    """

    inputs: tuple[Input, ...]
    model: str | None = None
    encoding_format: EncodingFormat = EncodingFormat.FLOAT
    dtype: EmbedDtype = EmbedDtype.FLOAT32
    dimensions: int | None = None
    dimensions_param: str = "dimensions"
    normalize: bool = True
    truncate: Truncate = Truncate.NONE
    max_tokens: int | None = None
    partial: bool = False
    user: str | None = None
    priority: int = 0
    request_id: str | None = None


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may hold: inputs, images in it and in one input, and characters of one text."""

    inputs: Annotated[int, Setting(flag="--max-inputs", check=POSITIVE, help="in one request")] = 2048
    images: Annotated[int, Setting(flag="--max-images", check=POSITIVE, help="in one request")] = 256
    images_per_input: Annotated[
        int, Setting(flag="--max-images-per-input", check=POSITIVE, help="in one input")
    ] = 16
    characters: int = 4_000_000


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


MESSAGE_ROLES: Final[dict[str, Role | None]] = {
    "query": Role.QUERY,
    "document": Role.PASSAGE,
    "passage": Role.PASSAGE,
    "user": None,
    "system": None,
    "developer": None,
    "assistant": None,
    "tool": None,
}
INPUT_TYPES: Final = {
    "query": Role.QUERY,
    "search_query": Role.QUERY,
    "passage": Role.PASSAGE,
    "document": Role.PASSAGE,
    "search_document": Role.PASSAGE,
}
TASKS: Final = {
    "query": Role.QUERY,
    "retrieval.query": Role.QUERY,
    "document": Role.PASSAGE,
    "retrieval.passage": Role.PASSAGE,
}
SUFFIXES: Final = {"-query": Role.QUERY, "-passage": Role.PASSAGE}


def message_role(value: Json, param: str) -> Role | None:
    if not isinstance(value, str) or value not in MESSAGE_ROLES:
        raise expected(param, f"one of {', '.join(MESSAGE_ROLES)}", value)
    return MESSAGE_ROLES[value]


def named_role(value: Json, param: str, known: dict[str, Role]) -> Role | None:
    """The role that ``input_type`` or ``task`` names; None when the value is null."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in known:
        raise expected(param, f"one of {', '.join(known)}", value)
    return known[value]


def split_model(name: str, served: Collection[str]) -> tuple[str, Role | None]:
    """The model's name without a role suffix, and the role the suffix names.

    With ``served`` names given, a suffix is removed only where that makes a served name.
    """
    if name not in served:
        for suffix, role in SUFFIXES.items():
            base = name.removesuffix(suffix)
            if base and base != name and (not served or base in served):
                return base, role
    return name, None


def decide(stated: Role | None, requested: Role | None, *, images: bool) -> Role:
    """``stated`` comes from the message, ``requested`` from the body or the model's name."""
    if stated is not None:
        return stated
    if requested is not None:
        return requested
    return Role.PASSAGE if images else Role.NONE
