"""Small versions of pictures, made in a confined process."""

from __future__ import annotations

import os
from typing import Final

import msgspec
from PIL import Image, ImageOps

from tessera import imaging
from tessera.errors import RequestError, Unavailable
from tessera.sandbox import Limits, Pool, ProcessLost, in_memory
from tessera.sandbox.memory import Memory

SIDE: Final = 400
"""Pixels of the longer side; a smaller picture stays as it is, but for what tells its right side up."""

_LIMITS: Final = Limits(seconds=20.0, memory_bytes=2 << 30, threads=imaging.needs_threads())


class Made(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """8-bit RGB in the shared memory, ``height`` rows of ``width`` pixels."""

    width: int
    height: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str


Answer = Made | Refusal

_encode = msgspec.msgpack.Encoder().encode
# A task is the size of the image file in the descriptor that comes along.
_decode_task = msgspec.msgpack.Decoder(int).decode
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Thumbnails:
    """Makes them one after another."""

    def __init__(self) -> None:
        self._pool = Pool(
            "thumbnailer", f"{__name__}:Handler", "", _answers, _LIMITS, shared_bytes=3 * SIDE**2, count=1
        )

    def make(self, data: bytes, *, source: str) -> Image.Image | str:
        """The picture upright, RGB, on white, within ``SIDE`` pixels; or why there is none."""
        descriptor = in_memory(data)
        try:
            return self._pool.call(_encode(len(data)), descriptor, _taken, over=source)
        except ProcessLost as loss:
            return {"crash": "its decoder crashed", "timeout": "it takes too long to decode"}[loss.why]
        except Unavailable as error:
            return error.message
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._pool.close()


def _taken(answer: Answer, memory: Memory) -> Image.Image | str:
    if isinstance(answer, Refusal):
        return answer.reason
    if not (0 < answer.width <= SIDE and 0 < answer.height <= SIDE):
        raise ProcessLost("crash")
    pixels = memory[: 3 * answer.width * answer.height].tobytes()
    return Image.frombytes("RGB", (answer.width, answer.height), pixels)


class Handler:
    """What makes them, in its confined process. Implements ``sandbox.memory.Handler``."""

    def __init__(self, argument: str) -> None:
        # A confined process can import nothing: what codecs import late is imported here.
        imaging.load_codecs()
        ImageOps.contain(Image.new("RGB", (8, 8)), (4, 4))

    def answer(self, memory: Memory, task: bytes, descriptor: int) -> bytes:
        try:
            small = _small(os.pread(descriptor, _decode_task(task), 0))
        except MemoryError:
            return _encode(Refusal(reason="decoding it takes too much memory"))
        except RequestError as error:
            return _encode(Refusal(reason=error.message))
        pixels = small.tobytes()
        memory[: len(pixels)].data[:] = pixels
        return _encode(Made(width=small.width, height=small.height))


def _small(data: bytes) -> Image.Image:
    image = imaging.decode(data, param="the file")
    return ImageOps.contain(image, (SIDE, SIDE)) if max(image.size) > SIDE else image
