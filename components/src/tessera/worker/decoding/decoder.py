"""What decodes an image, and the decoder that does it where it is called."""

from __future__ import annotations

from typing import Protocol

from tessera import imaging
from tessera.models.base import Model, UInt8Array


class Decoder(Protocol):
    """Called from several threads at a time."""

    def tiles(self, data: bytes, *, param: str) -> UInt8Array:
        """uint8 ``[tiles, channels, height, width]``; raises ``RequestError`` subclasses naming ``param``."""
        ...

    def close(self) -> None: ...


def decode(model: Model, data: bytes, *, param: str, max_pixels: int) -> UInt8Array:
    # The frontend has looked at the header too, but a worker does not trust its callers with memory.
    imaging.probe(data, param=param, max_pixels=max_pixels)
    return model.preprocess(data, param=param)


class ThreadDecoder:
    """Decodes on the caller's thread. A decoder that crashes takes the worker with it."""

    def __init__(self, model: Model, *, max_pixels: int) -> None:
        self._model = model
        self._max_pixels = max_pixels

    def tiles(self, data: bytes, *, param: str) -> UInt8Array:
        return decode(self._model, data, param=param, max_pixels=self._max_pixels)

    def close(self) -> None: ...
