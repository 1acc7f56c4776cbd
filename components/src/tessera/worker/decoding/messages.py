"""The messages between a worker and its image decoders, in MessagePack.

Image files and pixels are not in them: a file goes as a descriptor of anonymous memory, pixels in memory
that both sides have mapped for as long as the decoder lives. Pages that are used again cost a tenth of new
ones.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from tessera import sandbox
from tessera.image_plan import ImagePlan
from tessera.models.base import VisionSpec


class Limits(sandbox.Limits, frozen=True, kw_only=True):
    """What one decoder may use for one image, ``max_pixels`` of it."""

    max_pixels: int


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What decoders are made of: the checkpoint's directory, its options."""

    model_path: str
    options: dict[str, object]
    limits: Limits


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """An image file of ``size`` bytes lies in the descriptor that comes along."""

    size: int
    param: str


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pixels of this shape and type lie in the shared memory, from its beginning on."""

    shape: tuple[int, ...]
    dtype: Literal["uint8", "float32"]
    plan: ImagePlan


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A ``TesseraError``, by its code."""

    code: str
    message: str
    param: str | None


Answer = Decoded | Refusal

encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(Task).decode
decode_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def memory_bytes(vision: VisionSpec) -> int:
    """What the largest image takes as float32; pages are no memory until they are written to."""
    return vision.max_units * math.prod(vision.unit_shape) * np.dtype(np.float32).itemsize
