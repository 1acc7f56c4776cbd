"""One decoding process: confined, then one image after another until its worker hangs up."""

from __future__ import annotations

import os
import socket

from tessera.errors import EngineFailed, PayloadTooLarge, TesseraError
from tessera.models.base import Model, UInt8Array
from tessera.worker.decoding.decoder import decode
from tessera.worker.decoding.messages import (
    MAX_BYTES,
    Answer,
    Limits,
    Refusal,
    Task,
    Tiles,
    decode_task,
    encode,
)
from tessera.worker.decoding.sandbox import allow_cpu, confine

_MAX_MESSAGE = 4096


def serve(channel: socket.socket, memory: UInt8Array, model: Model, limits: Limits) -> None:
    """``memory`` is what the worker has mapped as well; tiles are left there."""
    confine(memory_bytes=limits.memory_bytes)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, 1)
        if not message:
            return
        allow_cpu(limits.seconds)
        channel.send(encode(_answer(memory, model, limits, decode_task(message), descriptors[0])))


def _answer(memory: UInt8Array, model: Model, limits: Limits, task: Task, descriptor: int) -> Answer:
    try:
        data = _read(descriptor, task.size)
        tiles = decode(model, data, param=task.param, max_pixels=limits.max_pixels)
        memory[: tiles.size].reshape(tiles.shape)[...] = tiles
        count, channels, height, width = tiles.shape
        return Tiles(shape=(count, channels, height, width))
    except MemoryError:
        error: TesseraError = PayloadTooLarge(
            f"{task.param}: decoding the image takes more than {limits.memory_bytes >> 20} MiB",
            param=task.param,
        )
    except TesseraError as refused:
        error = refused
    except Exception as failed:  # a family's own fault, which the worker is told of instead of losing us
        error = EngineFailed(f"preprocessing failed: {type(failed).__name__}: {failed}", param=task.param)
    return Refusal(code=error.code, message=error.message[:_MAX_MESSAGE], param=error.param)


def _read(descriptor: int, size: int) -> bytes:
    try:
        return os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)
