"""Decoders of images: on the calling thread, or in a pool of processes that may crash, hang or swell.

Each process has limits on memory, CPU time and output (``sandbox``). It is killed when an image takes longer
than its time. Pixels come back in memory that both sides have mapped. They are copied out of it, because the
decoder can still write to it.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tessera import imaging
from tessera.errors import DecodeFailed, Unavailable, from_code
from tessera.models.base import Model, Pixels, UInt8Array, VisionSpec
from tessera.worker.decoding.messages import (
    MAX_BYTES,
    Decoded,
    Limits,
    Refusal,
    Task,
    decode_answer,
    encode,
    mapped,
    memory_bytes,
    shared,
)

log = logging.getLogger(__name__)

_START_SECONDS = 120.0
_FORK_SECONDS = 10.0
_ENVIRONMENT = {
    # One thread, so that the fork server may fork.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Each image takes and gives back the same few blocks: what the allocator returns to the system in
    # between has to be faulted in again, which nearly doubled the time for a tile of 512 x 512 pixels.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
# Not passed on to decoders.
_WITHHELD = ("TESSERA_API_KEYS", "TESSERA_TLS_KEY_PASSWORD", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class Decoder(Protocol):
    """Called from several threads at a time."""

    def decode(self, data: bytes, *, param: str) -> Pixels:
        """The image's pixels and what it became; raises ``RequestError`` subclasses naming ``param``."""
        ...

    def close(self) -> None: ...


def fits(decoded: Decoded, vision: VisionSpec) -> bool:
    """Whether an image of the family can have become this."""
    return (
        1 <= decoded.plan.units <= vision.max_units
        and 1 <= decoded.plan.rows <= vision.max_rows
        and decoded.shape == (decoded.plan.units, *vision.unit_shape)
    )


def write(memory: npt.NDArray[np.uint8], pixels: Pixels) -> Decoded:
    """Leave the pixels in ``memory``; raises ``ValueError`` for more than there is room for."""
    values = pixels.values
    memory[: values.nbytes].view(values.dtype).reshape(values.shape)[...] = values
    return Decoded(shape=values.shape, dtype=values.dtype.name, plan=pixels.plan)  # type: ignore[arg-type]


def read(memory: npt.NDArray[np.uint8], decoded: Decoded) -> Pixels:
    """A copy of the pixels, which have been found to fit."""
    dtype = np.dtype(decoded.dtype)
    values = memory[: math.prod(decoded.shape) * dtype.itemsize].view(dtype).reshape(decoded.shape)
    return Pixels(values=values.copy(), plan=decoded.plan)


def decode(model: Model, data: bytes, *, param: str, max_pixels: int) -> Pixels:
    """An image file's pixels, as ``Decoder.decode``."""
    # The frontend has read the header too, but a worker does not rely on its callers for its memory.
    imaging.probe(data, param=param, max_pixels=max_pixels)
    return model.preprocess(data, param=param)


class ThreadDecoder:
    """Decodes on the calling thread. A library that crashes takes the worker with it."""

    def __init__(self, model: Model, *, max_pixels: int) -> None:
        self._model = model
        self._max_pixels = max_pixels

    def decode(self, data: bytes, *, param: str) -> Pixels:
        return decode(self._model, data, param=param, max_pixels=self._max_pixels)

    def close(self) -> None: ...


class ProcessDecoder:
    """``count`` decoding processes, each used by one thread at a time. Implements ``Decoder``.

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
        self._lost = lost
        self._server = _ForkServer(model_path, options, vision, limits)
        # None stands for a process that was killed and is forked again by the next thread that takes it.
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._count = count
        try:
            for _ in range(count):
                self._idle.put(self._server.fork())
        except BaseException:
            self._server.close()
            raise

    def decode(self, data: bytes, *, param: str) -> Pixels:
        """Raises ``DecodeFailed`` when the decoder crashed or ran out of time over this image, and
        ``Unavailable`` when no process can be had."""
        process = self._idle.get()
        try:
            if process is None:
                process = self._server.fork()
            return process.decode(data, param=param, timeout=self._limits.seconds)
        except _ProcessLost as loss:
            assert process is not None
            log.warning("decoder %d is replaced: %s over %s", process.pid, loss.why, param)
            process.kill()
            process = None
            self._lost(loss.why)
            if not self._server.alive:
                raise Unavailable("the image decoders went away") from None
            raise DecodeFailed(_MESSAGES[loss.why].format(param, self._limits.seconds), param=param) from None
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Ends every process; no call may be under way."""
        for _ in range(self._count):
            process = self._idle.get()
            if process is not None:
                process.kill()
        self._server.close()


_MESSAGES = {
    "crash": "{}: the image could not be decoded: its decoder crashed",
    "timeout": "{}: the image could not be decoded within {:g} seconds",
}


class _ProcessLost(Exception):
    """A process that cannot be used any more."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _Process:
    """One decoding process: its pidfd, the socket that it reads, the memory that it leaves pixels in."""

    def __init__(
        self, pid: int, pidfd: int, channel: socket.socket, memory: UInt8Array, vision: VisionSpec
    ) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._channel = channel
        self._memory = memory
        self._vision = vision

    def decode(self, data: bytes, *, param: str, timeout: float) -> Pixels:
        self._channel.settimeout(timeout)
        try:
            descriptor = _in_memory(data)
            try:
                task = encode(Task(size=len(data), param=param))
                socket.send_fds(self._channel, [task], [descriptor])
            finally:
                os.close(descriptor)
            message = self._channel.recv(MAX_BYTES)
        except TimeoutError:
            raise _ProcessLost("timeout") from None
        except OSError:
            raise _ProcessLost("crash") from None
        try:
            answer = decode_answer.decode(message)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # The socket was closed, or the message is none of a decoder.
            raise _ProcessLost("crash") from None
        if isinstance(answer, Refusal):
            raise from_code(answer.code, answer.message, param=answer.param or param)
        if not fits(answer, self._vision):
            raise _ProcessLost("crash")
        return read(self._memory, answer)

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(self._pidfd)
            self._channel.close()
            # Unmapped now, and not when the last traceback that refers to this object is gone.
            self._memory = np.empty(0, np.uint8)


def _in_memory(data: bytes) -> int:
    """A descriptor of new memory that holds ``data``; the caller closes it."""
    descriptor = os.memfd_create("tessera-image", os.MFD_CLOEXEC)
    try:
        view, written = memoryview(data), 0
        while written < len(view):
            written += os.write(descriptor, view[written:])
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class _ForkServer:
    """The process that forks decoders (``child``); started again when it has gone.

    ``multiprocessing`` has one that is as fast and as small, but weaker. Measured in turn, ten times each,
    with Python 3.11 on two cores that others used too: the first decoder was there after 0.34 to 0.93 s
    with it and 0.37 to 0.82 s here; a killed one was replaced and had decoded 512 x 512 pixels after 21 to
    51 ms and 22 to 42 ms (medians of 30); a decoder had 36 to 37 MiB of its own and 35 to 36. But its
    socket has a name that every decoder knows: a decoder under all limits connected to it, and what it sent
    was unpickled and run in a process without any limit. Here the socket has no name, and decoders close
    it. That fork server also starts with the worker's own environment, API keys included, and
    ``Connection.recv_bytes`` waits for the rest of a message without limit, where a datagram comes whole or
    not at all.
    """

    def __init__(
        self, model_path: Path, options: Mapping[str, object], vision: VisionSpec, limits: Limits
    ) -> None:
        self._vision = vision
        self._command = [sys.executable, "-m", "tessera.worker.decoding.child"]
        self._arguments = [
            str(model_path),
            *(msgspec.json.encode(part).decode() for part in (dict(options), limits)),
        ]
        self._lock = threading.Lock()
        self._forks = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._start()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def fork(self) -> _Process:
        with self._lock:
            if not self.alive:
                log.warning("the process that forks image decoders is gone; starting it again")
                self._stop()
                self._start()
            assert self._control is not None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            memory = shared(memory_bytes(self._vision))
            try:
                self._forks += 1
                with theirs:
                    number = str(self._forks).encode()
                    socket.send_fds(self._control, [number], [theirs.fileno(), memory])
                return _Process(*self._forked(self._control), ours, mapped(os.dup(memory)), self._vision)
            except (OSError, ValueError, IndexError) as error:
                ours.close()
                raise Unavailable(f"no image decoder could be started: {error}") from error
            finally:
                os.close(memory)

    def _forked(self, control: socket.socket) -> tuple[int, int]:
        """The newest decoder's pid and pidfd."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
            number, pid = message.split()
            if int(number) == self._forks:
                return int(pid), descriptors[0]
            # The answer to an earlier request, which timed out. Its channel is closed, so that decoder ends.
            os.close(descriptors[0])

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), *self._arguments],
                env=environment | _ENVIRONMENT,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._control = ours
        ours.settimeout(_START_SECONDS)
        try:
            ready = ours.recv(16) == b"ready"
        except OSError:
            ready = False
        if not ready:
            self._stop()
            raise Unavailable("the image decoders could not be started; see the messages above")
        ours.settimeout(_FORK_SECONDS)

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None
