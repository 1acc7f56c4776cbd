"""What a model family has to provide, and nothing about how it is served.

A family is a package below ``tessera.models`` (or an installed package that declares a
``tessera.models`` entry point) whose ``open_model(path)`` returns a ``Model``. Opening reads
configuration and tokenizer files only and never imports torch, because the frontend opens models too;
``load_vision`` and ``load_text`` import torch and read weights, each only the tensors it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int32Array = npt.NDArray[np.int32]
UInt8Array = npt.NDArray[np.uint8]


class Role(StrEnum):
    """Which side of a retrieval pair an input is on; families turn it into a prompt prefix."""

    QUERY = "query"
    PASSAGE = "passage"
    NONE = "none"


class Truncate(StrEnum):
    """What to do with an input that is too long: refuse it, drop its beginning, or drop its end."""

    NONE = "NONE"
    START = "START"
    END = "END"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One input as the backbone reads it.

    ``tokens`` is int32 ``[n]`` with a placeholder token for each vision row; ``image_tokens`` counts the
    placeholders. ``truncated`` says that text was dropped.
    """

    tokens: Int32Array
    image_tokens: int
    truncated: bool = False

    @property
    def text_tokens(self) -> int:
        return len(self.tokens) - self.image_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One token of a text; ``start`` and ``stop`` are its place in characters, None for special tokens."""

    token: int
    text: str
    start: int | None = None
    stop: int | None = None


class VisionModule(Protocol):
    """``uint8 [n, 3, height, width]`` on the module's device → ``[n, tokens_per_tile, hidden]``."""

    def __call__(self, tiles: torch.Tensor) -> torch.Tensor: ...


class TextModule(Protocol):
    """A packed batch → float32 ``[batch, hidden]``, pooled and as long as pooling made them.

    Whoever runs the module scales them to unit length: some clients ask for the vectors as they are.

    All index tensors lie on the module's device; nothing in the call may wait for it.
    """

    def __call__(
        self,
        input_ids: torch.Tensor,  # int32 [total]
        positions: torch.Tensor,  # int32 [total], restarting at 0 in each sequence
        cu_seqlens: torch.Tensor,  # int32 [batch + 1], the sequences' bounds in the packed axis
        lengths: Sequence[int],  # the same bounds on the host, as lengths
        vision_rows: torch.Tensor,  # [vision, hidden]
        vision_index: torch.Tensor,  # int32 [vision], the packed position of each vision row
    ) -> torch.Tensor: ...


class Model(Protocol):
    """One checkpoint, described without torch."""

    @property
    def family(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def fingerprint(self) -> str:
        """Names weights, preprocessing and prompts; part of every cache key.

        A family may look at a sample of the weights alone; what its fingerprint cannot tell apart is said
        where it is computed.
        """
        ...

    @property
    def hidden(self) -> int:
        """Width of a vision row and of the final vector."""
        ...

    @property
    def max_tokens(self) -> int:
        """Longest input, in tokens, that the backbone was made for."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokens_per_tile(self) -> int: ...

    @property
    def max_tiles(self) -> int:
        """Most tiles that one image can become, the thumbnail included."""
        ...

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one preprocessed tile."""
        ...

    @property
    def dimensions(self) -> frozenset[int]:
        """Output widths other than ``hidden`` that the checkpoint was trained for."""
        ...

    def tiles(self, width: int, height: int) -> int:
        """Tiles that an image of this upright size becomes."""
        ...

    def prompt(
        self,
        text: str | Sequence[int],
        tiles: Sequence[int],
        *,
        role: Role,
        max_tokens: int,
        truncate: Truncate,
        param: str,
    ) -> Prompt:
        """Tokenise one input; ``tiles`` lists each image's tile count.

        A sequence of token ids is taken as it is, without prefix or special tokens, and cannot be
        combined with images. Raises ``InvalidInput`` naming ``param`` for an input that is too long and
        may not be truncated, for an empty one, and for a token id outside the vocabulary.
        """
        ...

    def pieces(self, text: str, *, role: Role, param: str) -> Sequence[Piece]:
        """The tokens that a text is embedded as, special ones included; places count the role's prefix.

        Raises ``InvalidInput`` naming ``param`` for what is no text.
        """
        ...

    def token_text(self, token: int) -> str:
        """What the vocabulary calls a token; an id beyond it is an empty text."""
        ...

    def vision_index(self, tokens: Int32Array) -> Int32Array:
        """Positions of the placeholders in ``tokens``, ascending."""
        ...

    def preprocess(self, data: bytes, *, param: str) -> UInt8Array:
        """Decode an image file into uint8 ``[tiles, *tile_shape]``; thread-safe.

        Raises ``UnsupportedMedia`` or ``InvalidInput`` naming ``param``.
        """
        ...

    def load_vision(self, *, dtype: str, device: str) -> VisionModule: ...

    def load_text(self, *, dtype: str, device: str) -> TextModule: ...

    def vision_nbytes(self, dtype: str) -> int:
        """Bytes of the weights that ``load_vision`` keeps."""
        ...

    def text_nbytes(self, dtype: str) -> int: ...

    def vision_activation_nbytes(self, dtype: str, tiles: int) -> int:
        """Bytes that a vision batch of so many tiles takes beside the weights, at its widest point."""
        ...

    def text_activation_nbytes(self, dtype: str, tokens: int) -> int:
        """Bytes that a text batch of so many tokens takes beside the weights, at its widest point."""
        ...


class Family(Protocol):
    """A registered family: the ``model_type`` values it serves and how to open a checkpoint."""

    name: str
    model_types: Sequence[str]

    def open_model(self, path: Path) -> Model: ...
