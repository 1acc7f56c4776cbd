"""The one request that every client's form of a request is translated into.

Nothing here knows HTTP, JSON or a client's form; nothing that reads these types has to know which form the
client used. ``param`` is always the client's own path to the value (``input[3].content[0].image_url.url``).
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from tessera.errors import InvalidInput
from tessera.model_names import find_name
from tessera.models.base import Role, TokenIds, Truncate
from tessera.settings import POSITIVE, Setting

ROLE_SUFFIXES: Final = {"-query": Role.QUERY, "-passage": Role.PASSAGE}
"""What NIM's clients put behind a model's name to say what an input is for."""


def split_model(name: str, served: Collection[str]) -> tuple[str, Role | None]:
    """The model's name without a role suffix, and the role the suffix names.

    With ``served`` names given, a suffix is removed only where that makes a served name.
    """
    if name not in served and find_name(name, served) is None:
        for suffix, role in ROLE_SUFFIXES.items():
            base = name.removesuffix(suffix)
            if base and base != name and (not served or find_name(base, served) is not None):
                return base, role
    return name, None


class EncodingFormat(StrEnum):
    """How vectors are written: JSON numbers, base64 of raw values, or a raw body with or without metadata."""

    FLOAT = "float"
    BASE64 = "base64"
    BYTES = "bytes"
    BYTES_ONLY = "bytes_only"


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


class ImageSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where an image is: a data, ``http``, ``https`` or ``file`` URL, or an absolute local path.

    Nothing has been fetched or checked yet. ``uuid`` is the client's own name for the content; it is a
    claim, so it must never be trusted across clients. With one, ``url`` may be empty: what was sent before.
    ``embeddings`` says that the client means a tensor of vision rows and not an image, and ``grid``,
    (t, h, w) in patches, where in the image they lie, if the client says so beside the file.
    """

    url: str
    param: str
    uuid: str | None = None
    embeddings: bool = False
    grid: tuple[int, int, int] | None = None


class PixelSource(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Pixels that a client scaled and normalised itself, for one image: nothing rounds or normalises them.

    ``values`` is float32 or float16 ``[units, *unit_shape]``, as ``VisionSpec`` has them: ``[tiles, 3, 512,
    512]`` for llama_nemotron_vl. They are checked when the request runs, and errors name ``param``.
    """

    values: npt.NDArray[np.float32] | npt.NDArray[np.float16]
    param: str


Image = ImageSource | PixelSource

Part = str | TokenIds | Image
"""A part of an input: a text, token ids, or an image."""


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """What is embedded as one: texts and images in the client's order, or token ids.

    Token ids are the whole prompt. With images they come first and hold the images' placeholders, one for
    each vision row and in the order of the images; ids without placeholders have no images.

    No text is empty. ``prompt_name`` is that of a prompt of the checkpoint. ``malformed`` is why an input
    could not be read, where ``allow_partial`` lets the others go on; the other fields then mean nothing.
    ``chunked`` says that the input is a document and each of its parts, which are texts, a chunk of it.
    """

    parts: tuple[Part, ...]
    role: Role
    instruction: str | None = None
    param: str
    prompt_name: str | None = None
    malformed: InvalidInput | None = None
    chunked: bool = False
    # Kept, because they are asked for several times: 3 ms less for a request of 2048 short texts.
    images: tuple[Image, ...] = ()
    """The images among its parts."""
    size: int = 0
    """Characters of its texts, or its token ids."""

    @classmethod
    def of(cls, *, parts: tuple[Part, ...], role: Role, param: str, instruction: str | None = None) -> Input:
        """Make an input of its parts, and count these."""
        images = tuple([part for part in parts if isinstance(part, Image)])
        size = sum([len(part) for part in parts if not isinstance(part, Image)])
        return cls(parts=parts, role=role, param=param, instruction=instruction, images=images, size=size)


class AnyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What requests for vectors and for scores have in common.

    ``model`` is the name without a role suffix, None when the client named none. ``max_tokens`` bounds each
    input, or each pair of a reranker; None leaves that to the model. A smaller ``priority`` is more urgent.
    Caches keep what requests of different ``cache_salt`` send apart.
    """

    model: str | None = None
    truncate: Truncate = Truncate.NONE
    max_tokens: int | None = None
    priority: int = 0
    request_id: str | None = None
    cache_salt: str = ""


class EmbeddingsRequest(AnyRequest, frozen=True, kw_only=True):
    """A request for vectors, one per input and in their order.

    ``outputs`` names the wanted ones, without any the model's default. ``dimensions`` is the wanted width of
    dense vectors, None for the model's own, and ``most_active`` the most weights of a sparse one, the
    largest. ``tokens`` asks for the texts of its ids. ``dimensions_param`` and ``dtype_param`` are the
    client's own names of those fields. ``normalize`` asks for unit vectors. ``multivector`` asks for a vector
    of each token by name; raw values are little-endian unless ``big_endian``. ``allow_partial`` asks for the
    good inputs' vectors when others fail.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[str, ...] = ()
    encoding_format: EncodingFormat = EncodingFormat.FLOAT
    dtype: EmbedDtype = EmbedDtype.FLOAT32
    dtype_param: str = "embed_dtype"
    dimensions: int | None = None
    dimensions_param: str = "dimensions"
    most_active: int | None = None
    tokens: bool = False
    normalize: bool = True
    multivector: bool = False
    big_endian: bool = False
    allow_partial: bool = False


class ScoreRequest(AnyRequest, frozen=True, kw_only=True):
    """A request for a score of each document; ``queries`` is one for all of them, or one for each.

    ``max_query_tokens`` and ``max_document_tokens`` bound one side; what is over its own bound loses its end.
    """

    queries: tuple[Input, ...]
    documents: tuple[Input, ...]
    max_query_tokens: int | None = None
    max_document_tokens: int | None = None


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may hold: inputs, documents to score, images in it and in one input, and characters of
    one text.

    NVIDIA's clients send up to 8,191 inputs, OpenAI's 2,048.
    """

    inputs: Annotated[int, Setting(flag="--max-inputs", check=POSITIVE, help="inputs in one request")] = 8192
    documents: Annotated[
        int, Setting(flag="--max-documents", check=POSITIVE, help="documents to score in one request")
    ] = 1000
    images: Annotated[int, Setting(flag="--max-images", check=POSITIVE, help="images in one request")] = 256
    images_per_input: Annotated[
        int, Setting(flag="--max-images-per-input", check=POSITIVE, help="images in one input")
    ] = 16
    characters: int = 4_000_000


class Modality(StrEnum):
    """What a client says an input is; NIM's values."""

    TEXT = "text"
    IMAGE = "image"
    TEXT_IMAGE = "text_image"
