"""A pool of confined processes that may crash, hang or swell over a file.

Each process has limits on memory, CPU time and output (``confinement``). It is killed when a task takes
more of them than it may, or does not end. Large results come back in memory that both sides have mapped.
They are copied out of it, because the process can still write to it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

import msgspec
import numpy as np

from tessera.errors import Unavailable
from tessera.sandbox.memory import MAX_BYTES, READY, READY_UNFILTERED, Limits, Memory, mapped, shared

log = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")

_START_SECONDS: Final = 120.0
_FORK_SECONDS: Final = 10.0
# Processes that a call loses without its file's fault: one that had ended before, and one forked by a server
# that was just being killed. The next is of a new server; one more, for somebody who kills that one, too.
_ATTEMPTS: Final = 4
_ENVIRONMENT: Final = {
    # One thread, so that the fork server may fork.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Each image takes and gives back the same few blocks: what the allocator returns to the system in
    # between has to be faulted in again, which nearly doubled the time for a tile of 512 x 512 pixels.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    # In pages of 2 MiB the same work takes an eighth less time; where the system has none, or the C library
    # does not know the word, nothing changes.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
# A longer file is written without the interpreter's lock, and leaves no pages behind in the shared memory.
_MOST_ROOM: Final = 1 << 20
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Not passed on to the processes.
_WITHHELD: Final = ("TESSERA_API_KEYS", "TESSERA_TLS_KEY_PASSWORD", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class ProcessLost(Exception):
    """A process that cannot be used any more; ``why`` is ``crash``, ``timeout`` or ``stopped``.

    Within a pool it is ``gone``, too, for a process that had ended before it was asked.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Stop:
    """Ends one call of a pool from another thread, by killing the process that is at it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._stopped = self._killed = False

    def stop(self) -> None:
        """End the call, now or before it has begun; nothing where it has ended."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._killed = True
                self._process.interrupt()

    def begin(self, process: _Process) -> None:
        """Let ``stop`` kill the process; raises ``ProcessLost`` where it was called before."""
        with self._lock:
            if self._stopped:
                raise ProcessLost("stopped")
            self._process = process

    def end(self) -> bool:
        """Let ``stop`` do nothing any more; whether it has killed the process."""
        with self._lock:
            self._process = None
            return self._killed


def in_memory(data: bytes, *, sealed: bool = False) -> int:
    """A descriptor of new memory that holds ``data``, for ever where it is sealed; the caller closes it."""
    descriptor = os.memfd_create("tessera-file", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING * sealed)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        if sealed:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Pool(Generic[A]):
    """``count`` confined processes, each used by one thread at a time.

    ``name`` is what one of them is called. ``handler`` is ``MODULE:NAME`` of what makes a ``memory.Handler``
    of ``argument``, in the process that the others are forked from. ``answers`` reads its answers, and
    ``shared_bytes`` is the size of the memory beside them. ``lost`` is called on the calling thread with the
    reason why a process had to be replaced: ``crash`` or ``timeout``.
    """

    def __init__(
        self,
        name: str,
        handler: str,
        argument: str,
        answers: msgspec.msgpack.Decoder[A],
        limits: Limits,
        *,
        shared_bytes: int,
        count: int,
        lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._name = name
        self._limits = limits
        self.room = min(shared_bytes, _MOST_ROOM)
        self._answers = answers
        self._lost = lost
        self._server = _ForkServer(name, handler, argument, limits, shared_bytes)
        # None stands for a process that was killed and is forked again by the next thread that takes it.
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        self._count = count
        try:
            for _ in range(count):
                self._idle.put(self._server.fork())
        except BaseException:
            self._server.close()
            raise

    def call(self, task: bytes, file: int | bytes, read: Callable[[A, Memory], T], *, over: str) -> T:
        """Return what ``read`` makes of the answer to a task with a file.

        The file is in a descriptor, or is its bytes where it has at most ``room`` of them. ``read`` raises
        ``ProcessLost`` for an answer that cannot be, and copies what it keeps of the memory. ``over`` names
        the file in log lines. Raises ``ProcessLost`` when the process crashed or ran out of time, and
        ``Unavailable`` when no process can be had. A file that is not to blame for the loss of a process goes
        to a new one. Whether a process is still there is not asked before: with every call of the system a
        thread gives up the interpreter's lock, which a busy event loop then keeps for up to a millisecond.
        """
        process = self._idle.get()
        try:
            for _ in range(_ATTEMPTS):
                if process is None:
                    process = self._server.fork()
                try:
                    return read(process.ask(task, file, self._answers), process.memory)
                except ProcessLost as loss:
                    lost, process = process, None
                    if self._is_guilty(lost, loss.why, over):
                        raise
            raise Unavailable(f"the {self._name}s went away")
        finally:
            self._idle.put(process)

    def call_until(
        self, stop: Stop, task: bytes, descriptor: int, read: Callable[[A, Memory], T], *, over: str
    ) -> T:
        """Return what ``call`` returns, which ``stop`` may end: raises ``ProcessLost`` (``stopped``).

        It stands apart from ``call``, whose lines each image passes.
        """
        process = self._idle.get()
        try:
            if process is not None and not self._server.forked(process):
                process.kill()
                process = None
            if process is None:
                process = self._server.fork()
            stop.begin(process)
            answer = process.ask(task, descriptor, self._answers)
            return read(answer, process.memory)
        except ProcessLost as loss:
            assert process is not None
            if loss.why == "stopped":
                raise
            if stop.end():
                raise ProcessLost("stopped") from None
            lost, process = process, None
            if self._is_guilty(lost, loss.why, over):
                raise
            raise Unavailable(f"the {self._name}s went away") from None
        finally:
            # It may have been killed a moment after its answer.
            if stop.end() and process is not None:
                process.kill()
                process = None
            self._idle.put(process)

    def _is_guilty(self, process: _Process, why: str, over: str) -> bool:
        """End a process that is lost; false where it was gone before, or the one that forked it."""
        log.warning("%s %d is replaced: %s over %s", self._name, process.pid, why, over)
        alive = self._server.forked(process)
        process.kill()
        self._lost("crash" if why == "gone" else why)
        return alive and why != "gone"

    def close(self) -> None:
        """Ends every process; no call may be under way."""
        for _ in range(self._count):
            process = self._idle.get()
            if process is not None:
                process.kill()
        self._server.close()


class _Process:
    """One confined process: its pidfd, the socket that it reads, the memory that it leaves results in, and
    the pid of the process that forked it; see ``Limits`` for the times that it has for an answer."""

    def __init__(
        self, pid: int, pidfd: int, channel: socket.socket, memory: Memory, parent: int, limits: Limits
    ) -> None:
        self.pid = pid
        self.parent = parent
        self.memory = memory
        # Writing through it keeps the interpreter's lock, which numpy gives up.
        self._files = memory.data
        self._pidfd = pidfd
        self._channel = channel
        # The kernel's: with a timeout of Python's own each call polls first.
        self._seconds = limits.seconds
        self._spent = 0.0
        patience = limits.stuck_seconds
        left = struct.pack("ll", int(patience), max(1, int(patience % 1 * 1e6)))
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, left)

    def ask(self, task: bytes, file: int | bytes, answers: msgspec.msgpack.Decoder[A]) -> A:
        self._spent = self._cpu_seconds()
        try:
            if isinstance(file, int):
                socket.send_fds(self._channel, [task], [file])
            else:
                self._files[: len(file)] = file
                self._channel.send(task)
        except OSError:
            raise ProcessLost("gone") from None
        try:
            return answers.decode(self._channel.recv(MAX_BYTES))
        except BlockingIOError:
            raise ProcessLost("timeout") from None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            # The socket was closed, or the message is none of a handler. The kernel ends a process that has
            # no CPU time left.
            spent = self._cpu_seconds() - self._spent >= self._seconds
            raise ProcessLost("timeout" if spent else "crash") from None

    def _cpu_seconds(self) -> float:
        """The CPU time of the process, until the fork server has reaped it; takes half a microsecond."""
        with suppress(OSError):
            # ``MAKE_PROCESS_CPUCLOCK`` of Linux, which ``clock_getcpuclockid`` is made of.
            return time.clock_gettime(~self.pid << 3 | 2)
        return self._spent

    def interrupt(self) -> None:
        """Kill the process; who waits for its answer sees that it is gone."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(self._pidfd)
            self._channel.close()
            # Unmapped now, and not when the last traceback that refers to this object is gone.
            self.memory = np.empty(0, np.uint8)
            self._files = self.memory.data


class _ForkServer:
    """The process that forks the others (``child``); started again when it has gone.

    ``multiprocessing`` has one that is as fast and as small, but weaker. Measured in turn, ten times each,
    with Python 3.11 on two cores that others used too: the first decoder was there after 0.34 to 0.93 s
    with it and 0.37 to 0.82 s here; a killed one was replaced and had decoded 512 x 512 pixels after 21 to
    51 ms and 22 to 42 ms (medians of 30); a decoder had 36 to 37 MiB of its own and 35 to 36. But its
    socket has a name that every decoder knows: a decoder under limits on memory, time and output connected
    to it, and what it sent was unpickled and run in a process without any limit. Here the socket has no
    name, and decoders close it. That fork server also starts with the worker's own environment, API keys
    included, and ``Connection.recv_bytes`` waits for the rest of a message without limit, where a datagram
    comes whole or not at all.
    """

    def __init__(self, name: str, handler: str, argument: str, limits: Limits, shared_bytes: int) -> None:
        self._name = name
        self._shared_bytes = shared_bytes
        self._limits = limits
        self._arguments = [msgspec.json.encode(limits).decode(), handler, argument]
        self._lock = threading.Lock()
        self._forks = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._start()

    @property
    def _alive(self) -> bool:
        process, control, hung_up = self._process, self._control, select.poll()
        if process is None or control is None or process.poll() is not None:
            return False
        # Of a process that ends, the kernel closes the files, ends those it forked, then has its status.
        with suppress(ValueError):
            hung_up.register(control, select.POLLHUP)
            return not hung_up.poll(0)
        # Another thread has closed this end.
        return False

    def forked(self, process: _Process) -> bool:
        """Whether the process is one of those that end with the fork server that runs now."""
        server = self._process
        return server is not None and server.pid == process.parent and self._alive

    def fork(self) -> _Process:
        with self._lock:
            try:
                if self._alive:
                    with suppress(ConnectionError):
                        return self._fork()
                # It was gone, or has ended since.
                log.warning("the process that forks %ss is gone; starting it again", self._name)
                self._stop()
                self._start()
                return self._fork()
            except (OSError, ValueError, IndexError) as error:
                raise Unavailable(f"no {self._name} could be started: {error}") from error

    def _fork(self) -> _Process:
        assert self._control is not None and self._process is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = shared(self._shared_bytes)
        try:
            self._forks += 1
            with theirs:
                number = str(self._forks).encode()
                socket.send_fds(self._control, [number], [theirs.fileno(), memory])
            pid, pidfd = self._forked(self._control)
            parent = self._process.pid
            return _Process(pid, pidfd, ours, mapped(os.dup(memory)), parent, self._limits)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(memory)

    def _forked(self, control: socket.socket) -> tuple[int, int]:
        """The newest process's pid and pidfd."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
            if not message:
                raise ConnectionResetError("the process that forks has ended")
            number, pid = message.split()
            if int(number) == self._forks:
                return int(pid), descriptors[0]
            # The answer to an earlier request, which timed out. Its channel is closed, so that process ends.
            os.close(descriptors[0])

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tessera.sandbox.child", str(theirs.fileno()), *self._arguments],
                env=environment | _ENVIRONMENT,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._control = ours
        ours.settimeout(_START_SECONDS)
        try:
            said = ours.recv(64)
        except OSError:
            said = b""
        if said == READY_UNFILTERED:
            log.warning(
                "this kernel has no seccomp: a file that takes over one of the %ss can open files and"
                " connections; limits on memory, time and output hold",
                self._name,
            )
        elif said != READY:
            self._stop()
            raise Unavailable(f"the {self._name}s could not be started; see the messages above")
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
