"""What a process tries that a file has taken over; imported by the process that forks it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tessera.sandbox.memory import IN_MEMORY, Memory

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
# Numbers on x86-64 and AArch64 of what Python has no function for.
CLONE3, IO_URING_SETUP, BPF, USERFAULTFD = 435, 425, (321 if X86 else 280), (323 if X86 else 282)
OPEN_TREE, PIDFD_GETFD, PROCESS_VM_READV, PTRACE = 428, 438, (310 if X86 else 270), (101 if X86 else 117)


def call(number: int, *arguments: int) -> None:
    """A system call; raises ``OSError`` where it fails."""
    if LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def new_code() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if LIBC.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "refused")


# The pool's own process, whose pid is the task's argument: what a process must not reach.
ATTEMPTS: dict[str, Callable[[int], object]] = {
    "read a file": lambda pid: Path("/etc/hostname").read_bytes(),
    "write a file": lambda pid: Path("/tmp/tessera-attempt").touch(),
    "remove a file": lambda pid: os.remove("/tmp/tessera-attempt"),
    "see a file": lambda pid: os.stat("/"),
    "list a folder": lambda pid: os.listdir("/"),
    "list processes": lambda pid: os.readlink("/proc/self/exe"),
    "import": lambda pid: __import__("wave"),
    "memory file": lambda pid: os.memfd_create("more"),
    "pipe": lambda pid: os.pipe(),
    "internet": lambda pid: socket.socket(socket.AF_INET),
    "local socket": lambda pid: socket.socket(socket.AF_UNIX),
    "socket pair": lambda pid: socket.socketpair(),
    "fork": lambda pid: os.fork(),
    "thread": lambda pid: threading.Thread(target=int).start(),
    "program": lambda pid: os.execv("/bin/true", ["true"]),
    "child program": lambda pid: subprocess.run(["/bin/true"]),
    "clone3": lambda pid: call(CLONE3, 0, 0),
    "signal 0": lambda pid: os.kill(pid, 0),
    "signal": lambda pid: os.kill(pid, signal.SIGCONT),
    "signal to all": lambda pid: os.kill(-1, 0),
    "pidfd": lambda pid: os.pidfd_open(pid),
    "another's descriptor": lambda pid: call(PIDFD_GETFD, 0, 0, 0),
    "another's memory": lambda pid: call(PROCESS_VM_READV, pid, 0, 0, 0, 0, 0),
    "ptrace": lambda pid: call(PTRACE, 16, pid, 0, 0),
    "priority": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
    "new code": lambda pid: new_code(),
    "code in new memory": lambda pid: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    "more memory": lambda pid: resource.setrlimit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)),
    "standard output": lambda pid: os.write(1, b"said"),
    "io_uring": lambda pid: call(IO_URING_SETUP, 1, 0),
    "bpf": lambda pid: call(BPF, 0, 0, 0),
    "userfaultfd": lambda pid: call(USERFAULTFD, 0),
    "mounts": lambda pid: call(OPEN_TREE, -100, 0, 0),
}
# What ends the process.
ENDS: dict[str, Callable[[int], object]] = {
    "abort": lambda pid: os.abort(),
    "own kill": lambda pid: os.kill(os.getpid(), 9),
    "sleep": lambda pid: time.sleep(60),
    "spin": lambda pid: [None for _ in iter(int, 1)],
}
if X86:
    ENDS["x32"] = lambda pid: call(0x40000000 + 39)


class Handler:
    """Tries what a task names, and answers with what became of it."""

    def __init__(self, argument: str) -> None:
        self._argument = argument

    def answer(self, memory: Memory, task: bytes, descriptor: int) -> bytes:
        name, pid = msgspec.msgpack.decode(task, type=tuple[str, int])
        if name == "read":
            data = memory[:8].tobytes() if descriptor == IN_MEMORY else os.pread(descriptor, 100, 0)
            memory[: len(data)].data[:] = data
            return msgspec.msgpack.encode(f"{self._argument} {len(data)}")
        if name == "pause":
            time.sleep(0.6)
            return msgspec.msgpack.encode("rested")
        if name == "pid":
            return msgspec.msgpack.encode(str(os.getpid()))
        if name == "garbage":
            return b"\xc1"
        try:
            (ATTEMPTS | ENDS)[name](pid)
        except OSError as error:
            return msgspec.msgpack.encode(f"{error.errno}")
        except Exception as error:
            return msgspec.msgpack.encode(type(error).__name__)
        return msgspec.msgpack.encode("done")


def folder() -> str:
    """What the fork server's interpreter must search for this module."""
    return str(Path(__file__).parent.parent.parent)
