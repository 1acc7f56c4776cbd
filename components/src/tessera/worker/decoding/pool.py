"""Decoding in processes of their own, which may crash, hang or swell without the worker noticing.

Each has limits on memory, CPU time and output (``sandbox``), and an image that takes longer than its time
has its process killed. Tiles come back in memory that both sides have mapped, and are copied out of it:
what a decoder can still write to is not what the engine reads.
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
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from tessera.errors import DecodeFailed, Unavailable, from_code
from tessera.models.base import UInt8Array
from tessera.worker.decoding.messages import (
    MAX_BYTES,
    Limits,
    Refusal,
    Task,
    anonymous,
    decode_answer,
    encode,
    mapped,
    shared,
)

log = logging.getLogger(__name__)

_START_SECONDS = 120.0
_FORK_SECONDS = 10.0
_ENVIRONMENT = {
    # One thread, so that the nursery may fork.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Each image takes and gives back the same few blocks: what the allocator returns to the system in
    # between has to be faulted in again, which nearly doubled the time for a tile.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
# What decoders need not know.
_WITHHELD = ("TESSERA_API_KEYS",)


class ProcessDecoder:
    """``count`` decoding processes, each used by one thread at a time. Implements ``Decoder``.

    ``lost`` is told, on the calling thread, why a process had to be replaced: ``crash`` or ``timeout``.
    """

    def __init__(
        self,
        model_path: Path,
        limits: Limits,
        *,
        count: int,
        lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._limits = limits
        self._lost = lost
        self._nursery = _Nursery(model_path, limits)
        # A seat whose process is gone is None until somebody sits down on it.
        self._seats: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._count = count
        try:
            for _ in range(count):
                self._seats.put(self._nursery.fork())
        except BaseException:
            self._nursery.close()
            raise

    def tiles(self, data: bytes, *, param: str) -> UInt8Array:
        """Raises ``DecodeFailed`` when the decoder crashed or ran out of time over this image, and
        ``Unavailable`` when no process can be had."""
        process = self._seats.get()
        try:
            if process is None:
                process = self._nursery.fork()
            return process.decode(data, param=param, timeout=self._limits.seconds)
        except _Lost as loss:
            assert process is not None
            log.warning("decoder %d is replaced: %s over %s", process.pid, loss.why, param)
            process.kill()
            process = None
            self._lost(loss.why)
            if not self._nursery.alive:
                raise Unavailable("the image decoders went away") from None
            raise DecodeFailed(_MESSAGES[loss.why].format(param, self._limits.seconds), param=param) from None
        finally:
            self._seats.put(process)

    def close(self) -> None:
        """Ends every process; no call may be under way."""
        for _ in range(self._count):
            process = self._seats.get()
            if process is not None:
                process.kill()
        self._nursery.close()


_MESSAGES = {
    "crash": "{}: the image could not be decoded: its decoder crashed",
    "timeout": "{}: the image could not be decoded within {:g} seconds",
}


class _Lost(Exception):
    """A process that cannot be used any more."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _Process:
    """One decoding process: a descriptor of it, the socket it listens on, the memory it leaves tiles in."""

    def __init__(self, pid: int, handle: int, channel: socket.socket, memory: UInt8Array) -> None:
        self.pid = pid
        self._handle = handle
        self._channel = channel
        self._memory = memory

    def decode(self, data: bytes, *, param: str, timeout: float) -> UInt8Array:
        self._channel.settimeout(timeout)
        try:
            descriptor = anonymous(data)
            try:
                task = encode(Task(size=len(data), param=param))
                socket.send_fds(self._channel, [task], [descriptor])
            finally:
                os.close(descriptor)
            message = self._channel.recv(MAX_BYTES)
        except TimeoutError:
            raise _Lost("timeout") from None
        except OSError:
            raise _Lost("crash") from None
        try:
            answer = decode_answer.decode(message)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # Nothing came, or nothing that a decoder in its right mind sends.
            raise _Lost("crash") from None
        if isinstance(answer, Refusal):
            raise from_code(answer.code, answer.message, param=answer.param or param)
        size = math.prod(answer.shape)
        if min(answer.shape) < 1 or size > self._memory.size:
            raise _Lost("crash")
        return self._memory[:size].reshape(answer.shape).copy()

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(self._handle)
            self._channel.close()
            # Unmapped now, and not when the last traceback that knows us is gone.
            self._memory = np.empty(0, np.uint8)


class _Nursery:
    """The process that forks decoders; started again when it has gone."""

    def __init__(self, model_path: Path, limits: Limits) -> None:
        self._tile_bytes = limits.tile_bytes
        self._command = [sys.executable, "-m", "tessera.worker.decoding.nursery"]
        self._arguments = [str(model_path), msgspec.json.encode(limits).decode()]
        self._lock = threading.Lock()
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
            memory = shared(self._tile_bytes)
            try:
                with theirs:
                    socket.send_fds(self._control, [b"fork"], [theirs.fileno(), memory])
                message, descriptors, _, _ = socket.recv_fds(self._control, 16, 1)
                return _Process(int(message), descriptors[0], ours, mapped(os.dup(memory)))
            except (OSError, ValueError, IndexError) as error:
                ours.close()
                raise Unavailable(f"no image decoder could be started: {error}") from error
            finally:
                os.close(memory)

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
