"""The messages between a worker and its decoding processes.

Each message is MessagePack in one datagram of a socket pair. Image files and pixels are not in it. A file
goes as a descriptor of anonymous memory, pixels in memory that both sides have mapped for as long as the
decoder lives: pages that are used again cost a tenth of new ones.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tessera.image_plan import ImagePlan
from tessera.models.base import VisionSpec

MAX_BYTES: Final = 1 << 16

# Memory that can shrink turns an access into a bus error.
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one decoder may use: ``seconds`` of CPU time and of patience for one image, ``memory_bytes``
    beyond what the process has from the start, ``max_pixels`` of an image."""

    seconds: float
    memory_bytes: int
    max_pixels: int


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


def shared(nbytes: int) -> int:
    """A descriptor of ``nbytes`` of zeros whose size can never change; the caller closes it."""
    descriptor = os.memfd_create("tessera-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int) -> npt.NDArray[np.uint8]:
    """Such memory as uint8 ``[nbytes]``, which keeps it mapped; closes the descriptor."""
    try:
        return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
    finally:
        os.close(descriptor)


def memory_bytes(vision: VisionSpec) -> int:
    """What the largest image takes as float32; pages are no memory until they are written to."""
    return vision.max_units * math.prod(vision.unit_shape) * np.dtype(np.float32).itemsize
