"""From image files to pixels: on threads of this process, or in a pool of confined processes that may crash.

The messages to and from those processes hold no image files and no pixels: these lie in memory that both
sides have mapped for as long as the decoder lives, first the file and then the pixels. Pages that are used
again cost a tenth of new ones. A file that has no room there goes as a descriptor of anonymous memory.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np
from PIL import Image

from tessera import sandbox
from tessera.errors import DecodeFailed, EngineFailed, PayloadTooLarge, TesseraError
from tessera.image_plan import ImagePlan
from tessera.imaging import Picture, load_codecs
from tessera.models import open_model
from tessera.models.base import Empty, Model, Pixels, UInt8Array, VisionSpec
from tessera.sandbox import IN_MEMORY, Pool, ProcessLost, in_memory
from tessera.wire import Failure

_MAX_MESSAGE = 4096


class Limits(sandbox.Limits, frozen=True, kw_only=True):
    """What one decoder may use for one image, ``max_pixels`` of it."""

    max_pixels: int


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What decoders are made of: the checkpoint's directory, its options."""

    model_path: str
    options: dict[str, object]
    limits: Limits


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """An image file of ``size`` bytes lies in the descriptor that comes along, or in the shared memory."""

    size: int
    param: str


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pixels of this shape and type lie in the shared memory, from its beginning on."""

    shape: tuple[int, ...]
    dtype: Literal["uint8", "float32"]
    plan: ImagePlan


Answer = Decoded | Failure

encode = msgspec.msgpack.encode
decode_task = msgspec.msgpack.Decoder(Task).decode
decode_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def memory_bytes(vision: VisionSpec) -> int:
    """What the largest image takes as float32; pages are no memory until they are written to."""
    return vision.max_units * math.prod(vision.unit_shape) * np.dtype(np.float32).itemsize


class Decoder(Protocol):
    """Called from several threads at a time."""

    def decode(self, data: bytes, *, param: str) -> Pixels:
        """The image's pixels and what it became; raises ``RequestError`` subclasses naming ``param``."""
        ...

    def close(self) -> None: ...


def fits(decoded: Decoded, vision: VisionSpec) -> bool:
    """Whether an image of the family can have become this."""
    return vision.allows(decoded.plan) and decoded.shape == (decoded.plan.units, *vision.unit_shape)


def empty_in(memory: UInt8Array) -> Empty:
    """Gives the beginning of ``memory``; raises ``ValueError`` for more than there is room for."""

    def empty(shape: tuple[int, ...], dtype: type[np.uint8]) -> UInt8Array:
        return memory[: math.prod(shape)].reshape(shape)

    return empty


def write(memory: UInt8Array, pixels: Pixels) -> Decoded:
    """Leave the pixels in ``memory``, unless they were made at its beginning; raises as ``empty_in``."""
    values = pixels.values
    if values.ctypes.data != memory.ctypes.data or not values.flags.c_contiguous:
        memory[: values.nbytes].view(values.dtype).reshape(values.shape)[...] = values
    return Decoded(shape=values.shape, dtype=values.dtype.name, plan=pixels.plan)  # type: ignore[arg-type]


def read(memory: UInt8Array, decoded: Decoded) -> Pixels:
    """A copy of the pixels, which have been found to fit."""
    dtype = np.dtype(decoded.dtype)
    values = memory[: math.prod(decoded.shape) * dtype.itemsize].view(dtype).reshape(decoded.shape)
    return Pixels(values=values.copy(), plan=decoded.plan)


class ThreadDecoder:
    """Decodes on the calling thread. A library that crashes takes the worker with it."""

    def __init__(self, model: Model, *, max_pixels: int) -> None:
        self._model = model
        self._max_pixels = max_pixels

    def decode(self, data: bytes, *, param: str) -> Pixels:
        # The frontend has read the header too, but a worker does not rely on its callers for its memory.
        return self._model.preprocess(Picture(data, param=param, max_pixels=self._max_pixels))

    def close(self) -> None: ...


class ProcessDecoder:
    """Decodes in ``count`` confined processes. Implements ``Decoder``.

    ``lost`` is called on the calling thread with the reason why a process had to be replaced: ``crash`` or
    ``timeout``.
    """

    def __init__(
        self,
        model_path: Path,
        options: Mapping[str, object],
        vision: VisionSpec,
        limits: Limits,
        *,
        count: int,
        lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._limits = limits
        self._vision = vision
        setup = Setup(model_path=str(model_path), options=dict(options), limits=limits)
        self._pool = Pool(
            "image decoder",
            f"{__name__}:Handler",
            msgspec.json.encode(setup).decode(),
            decode_answer,
            limits,
            shared_bytes=memory_bytes(vision),
            count=count,
            lost=lost,
        )

    def decode(self, data: bytes, *, param: str) -> Pixels:
        """Raises ``DecodeFailed`` when the decoder crashed or ran out of time over this image, and
        ``Unavailable`` when no process can be had."""

        def taken(answer: Answer, memory: UInt8Array) -> Pixels:
            if isinstance(answer, Failure):
                raise answer.error().named(answer.param or param)
            if not fits(answer, self._vision):
                raise ProcessLost("crash")
            return read(memory, answer)

        file = data if len(data) <= self._pool.room else in_memory(data)
        try:
            return self._pool.call(encode(Task(size=len(data), param=param)), file, taken, over=param)
        except ProcessLost as loss:
            message = _MESSAGES[loss.why].format(param, self._limits.seconds)
            raise DecodeFailed(message, param=param) from None
        finally:
            if isinstance(file, int):
                os.close(file)

    def close(self) -> None:
        """Ends every process; no call may be under way."""
        self._pool.close()


_MESSAGES = {
    "crash": "{}: the image could not be decoded: its decoder crashed",
    "timeout": "{}: the image could not be decoded within {:g} seconds of processor time",
}


class Handler:
    """A decoder, in its confined process. Implements ``sandbox.memory.Handler``."""

    def __init__(self, setup: str) -> None:
        found = msgspec.json.decode(setup, type=Setup)
        self._model = open_model(Path(found.model_path), found.options)
        self._limits = found.limits
        # A confined process can import nothing, so what codecs and the family import late is imported here.
        load_codecs()
        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, "PNG")
        with contextlib.suppress(TesseraError):
            self._model.preprocess(Picture(file.getvalue(), param="warm-up"))

    def answer(self, memory: UInt8Array, task: bytes, descriptor: int) -> bytes:
        asked = decode_task(task)
        try:
            # A copy: pixels are written where the file was.
            there = descriptor == IN_MEMORY
            data = memory[: asked.size].tobytes() if there else os.pread(descriptor, asked.size, 0)
            picture = Picture(data, param=asked.param, max_pixels=self._limits.max_pixels)
            return encode(write(memory, self._model.preprocess(picture, empty_in(memory))))
        except Exception as error:
            return encode(self._failure(error, asked.param))

    def _failure(self, error: Exception, param: str) -> Failure:
        if isinstance(error, MemoryError):
            error = PayloadTooLarge(
                f"{param}: decoding the image takes more than {self._limits.memory_bytes >> 20} MiB",
                param=param,
            )
        elif not isinstance(error, TesseraError):
            # A defect of the family's code: the worker is told, and the decoder stays.
            error = EngineFailed(f"preprocessing failed: {type(error).__name__}: {error}", param=param)
        return Failure(code=error.code, message=error.message[:_MAX_MESSAGE], param=error.param)
