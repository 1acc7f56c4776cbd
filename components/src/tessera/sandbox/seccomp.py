"""The system calls that a confined process may still make, as a seccomp filter.

The list is of what is allowed: memory without new code, the files that it holds, the pool's socket, clocks,
its own signals and its own end. It can open no file and no connection, start nothing, and reach no other
process; such calls fail with ``EPERM``. What it needs beyond that, modules above all, is there before.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import struct
from typing import Final, NamedTuple

_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2

# Instructions of classic BPF, and where a filter finds the call: its number, its architecture, its six
# arguments of 64 bits each. Both machines are little endian.
_LOAD: Final = 0x20
_IF_EQUAL: Final = 0x15
_IF_AT_LEAST: Final = 0x35
_IF_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_ARGUMENTS: Final = 16

_ALLOW: Final = 0x7FFF0000
_KILL_PROCESS: Final = 0x80000000
_REFUSE: Final = 0x00050000 | errno.EPERM
_NO_SUCH_CALL: Final = 0x00050000 | errno.ENOSYS

_X32: Final = 0x40000000


class _Machine(NamedTuple):
    audit: int
    column: int


_MACHINES: Final = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}

# Numbers on x86-64 and on AArch64, from the kernel's tables. Those that a decoder makes for each image come
# first, because the kernel reads the filter from its beginning on.
_ALWAYS: Final = {
    "recvmsg": (47, 212),
    "pread64": (17, 67),
    "getrusage": (98, 165),
    "close": (3, 57),
    "munmap": (11, 215),
    "brk": (12, 214),
    "madvise": (28, 233),
    "mremap": (25, 216),
    "futex": (202, 98),
    "read": (0, 63),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "sched_yield": (24, 124),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getrandom": (318, 278),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
_CHECKED: Final = {
    "sendto": (44, 206),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "prlimit64": (302, 261),
    "write": (1, 64),
    "fcntl": (72, 25),
    "kill": (62, 129),
    "tgkill": (234, 131),
}


_CLONE: Final = (56, 220)
_CLONE3: Final = (435, 435)
_OF_THREADS: Final = {"set_robust_list": (273, 99), "rseq": (334, 293)}
# CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID.
_THREAD: Final = 0x3D0F00


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def supported() -> bool:
    """Whether this kernel has such filters, and this machine is one that they are written for."""
    if platform.machine() not in _MACHINES:
        return False
    # A kernel that has them looks for the filter, which is not there.
    return _set(None) == errno.EFAULT


def install(*, threads: bool = False) -> None:
    """Hold this process, which must have ``no_new_privs``, to the list for good; raises ``OSError``.

    With ``threads`` it may start some of its own, which are held to the list as well.
    """
    program = b"".join(_filter(_MACHINES[platform.machine()], os.getpid(), threads=threads))
    failed = _set(ctypes.pointer(_Program(len(program) // 8, program)))
    if failed:
        raise OSError(failed, f"seccomp: {os.strerror(failed)}")


def _set(program: ctypes._Pointer[_Program] | None) -> int:
    """0, or the kernel's error."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    done = prctl(ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(_MODE_FILTER), program)
    return 0 if done == 0 else ctypes.get_errno()


def _filter(machine: _Machine, pid: int, *, threads: bool) -> list[bytes]:
    conditions: dict[str, list[list[bytes]]] = {
        # Of the pool's socket, whose other end is given. No address: neither half of the pointer.
        "sendto": [_equal(4, 0), _equal(4, 0, upper=True)],
        # No code that was not there before.
        "mmap": [_no_bit(2, mmap.PROT_EXEC)],
        "mprotect": [_no_bit(2, mmap.PROT_EXEC)],
        # Its own processor time, which is allowed anew for each file.
        "prlimit64": [_equal(0, 0), _equal(1, resource.RLIMIT_CPU)],
        # What it says when it breaks.
        "write": [_equal(0, 2)],
        # A module that maps a file keeps its descriptor.
        "fcntl": [_equal(1, fcntl.F_DUPFD_CLOEXEC)],
        # ``abort`` and the like.
        "kill": [_equal(0, pid)],
        "tgkill": [_equal(0, pid)],
        # As ``pthread_create`` of glibc asks for a thread, and nothing that is a process.
        "clone": [_equal(0, _THREAD), _equal(0, 0, upper=True)],
    }
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_IF_EQUAL, machine.audit, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
        # Another way to make the calls of x86-64, by other numbers.
        _instruction(_IF_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _KILL_PROCESS),
    ]
    for numbers in _ALWAYS.values():
        program += [_instruction(_IF_EQUAL, numbers[machine.column], 0, 1), _instruction(_RETURN, _ALLOW)]
    if threads:
        # What its arguments are cannot be seen here. Told that there is none, glibc asks for the older call.
        for numbers, answer in ((_CLONE3, _NO_SUCH_CALL), *((own, _ALLOW) for own in _OF_THREADS.values())):
            program += [_instruction(_IF_EQUAL, numbers[machine.column], 0, 1), _instruction(_RETURN, answer)]
    for name, numbers in (_CHECKED | {"clone": _CLONE} if threads else _CHECKED).items():
        checks = [instruction for check in conditions[name] for instruction in check]
        block = [*checks, _instruction(_RETURN, _ALLOW)]
        program += [_instruction(_IF_EQUAL, numbers[machine.column], 0, len(block)), *block]
    return [*program, _instruction(_RETURN, _REFUSE)]


def _equal(argument: int, value: int, *, upper: bool = False) -> list[bytes]:
    """Go on where half an argument, the lower unless ``upper``, is ``value``."""
    return [
        _instruction(_LOAD, _ARGUMENTS + 8 * argument + 4 * upper),
        _instruction(_IF_EQUAL, value, 1, 0),
        _instruction(_RETURN, _REFUSE),
    ]


def _no_bit(argument: int, bits: int) -> list[bytes]:
    return [
        _instruction(_LOAD, _ARGUMENTS + 8 * argument),
        _instruction(_IF_ANY_BIT, bits, 0, 1),
        _instruction(_RETURN, _REFUSE),
    ]


def _instruction(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", code, then, otherwise, value)
