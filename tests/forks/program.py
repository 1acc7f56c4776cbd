"""A fork that becomes a program, as ``execve(2)`` and the start of an interpreter would have made it."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib.util
import io
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NoReturn

from tessera import siblings
from tessera.launch import children
from tessera.sandbox import pool

_PR_SET_PDEATHSIG = 1
# arg_start and env_start.
_ARGUMENTS_FIELD, _ENVIRONMENT_FIELD = 48, 50
_LIBC = ctypes.CDLL(None, use_errno=True)

HIGHEST = 1000
"""Programs know what they inherit by numbers below it."""

ROOM = "." * (1 << 16)
"""What the server has as an argument and in its environment: there forks have theirs."""

THREADS = "OMP_NUM_THREADS"

# What starts others by ``launch.children``, beside ``tessera serve``.
_STARTS_CHILDREN = ("tessera.launch", "tests.forks.probe")

# What starts others by ``subprocess``: a command its engines, the process that makes prompts its worker, a
# worker the fork server of its decoders, and a reader of sources those of its tables.
_STARTS_OTHERS = (
    "tessera.cli",
    "tessera.local.engine_process",
    "tessera.local.worker_process",
    "tessera.worker",
    "tessera.worker.together",
    "tessera_corpus.sources.read_process",
)

# What the package sets where nobody did, once it is imported: in the tests' process, too, as soon as one of
# them imports its workers. The server has it before it loads what reads it.
_SET_BY_IMPORT = {"OMP_WAIT_POLICY": "passive"}

# The environment of the server, and in the tests' process what it will be or was.
imported_with: dict[str, str] = {**os.environ, THREADS: "1"}

search_path: list[str] = []
"""The server's, without the folder that it ran in and those of its ``PYTHONPATH``."""

# Where a program finds modules, which a fork takes over before it imports its own.
_SAFE, _PATH = "PYTHONSAFEPATH", "PYTHONPATH"

# What a process reads when it needs it, and may have otherwise than the process that it is a fork of. Other
# variables are read by the interpreter, by the loader or by a library that is imported.
_READ_LATE = (
    "TESSERA_",
    "DYN_",
    _SAFE,
    "BENCHMARKS_PORTS",
    THREADS,
    "PYTEST_CURRENT_TEST",
    "TMPDIR",
    "ETCD_",
    "NATS_",
    "OTEL_BSP_",
    "OTEL_EXPORTER_",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_TRACES_",
    # Of huggingface_hub, which the server does not import.
    "HF_",
    # What the package sets when it is used, which it is in the tests' process, too.
    "NIXL_LOG_LEVEL",
    "UCX_NET_DEVICES",
    "TRITON_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_",
    "TORCHINDUCTOR_CACHE_DIR",
    # Of OpenMP by Intel, which nothing here loads: scikit-learn sets them, also when a test first imports it.
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
)


@dataclass(frozen=True, slots=True)
class Module:
    """What a command line runs; ``safe`` (``-P``) is without the folder that it runs in."""

    name: str
    arguments: list[str]
    safe: bool

    @classmethod
    def of(cls, command: Sequence[str]) -> Module | None:
        """The module that this interpreter is told to run; None for any other command line."""
        program, *words = command
        safe = words[:1] == ["-P"]
        words = words[safe:]
        if len(words) < 2 or words[0] != "-m" or os.path.abspath(program) != sys.executable:
            return None
        return cls(words[1], words[2:], safe)


def differs(environment: Mapping[str, str]) -> str | None:
    """A variable that a fork would not heed, as it is not what the server imported with; None without one."""
    # What confined processes have beside is for their speed.
    for name in (environment.keys() | imported_with.keys()) - _confined(environment):
        default = _SET_BY_IMPORT.get(name)
        same = environment.get(name, default) == imported_with.get(name, default)
        if not same and not name.startswith(_READ_LATE) and not (name == _PATH and _adds(environment)):
            return name
    return None


def _confined(environment: Mapping[str, str]) -> set[str]:
    return {name for name, value in pool._ENVIRONMENT.items() if environment.get(name) == value}


def folders_of(environment: Mapping[str, str]) -> list[str]:
    """Where its programs look for modules before they look where others do."""
    return [os.path.abspath(one) for one in environment.get(_PATH, "").split(os.pathsep) if one]


def _adds(environment: Mapping[str, str]) -> bool:
    """Whether the folders hide no module that the server may have, and add nothing that its imports read."""
    folders = {*folders_of(environment)} ^ {*folders_of(imported_with)}
    found = (entry.group for one in distributions(path=[*folders]) for entry in one.entry_points)
    if not {siblings.DOORS, siblings.CLIENT_APIS}.isdisjoint(found):
        return False
    return all(_is_new(name, folder) for folder in folders for name in _modules_in(folder))


def _modules_in(folder: str) -> Iterator[str]:
    for path in Path(folder).iterdir() if os.path.isdir(folder) else ():
        if path.suffix in (".py", ".so") or (path / "__init__.py").exists():
            yield path.name.partition(".")[0]


def _is_new(name: str, folder: str) -> bool:
    if name in ("sitecustomize", "usercustomize"):
        return False
    found = importlib.util.find_spec(name)
    return found is None or Path(found.origin or "").is_relative_to(folder)


def may_fork() -> None:
    """Raise ``RuntimeError`` in a process whose other threads a fork would lose."""
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads)} threads run here: {threading.enumerate()}")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the module of a command line in place of everything that this process was about."""
    status = 1
    try:
        # What the caller held stays as it is: a descriptor that it would close may be another one by now.
        gc.freeze()
        _reset_signals()
        os.environ.clear()
        os.environ.update(environment)
        _show(command, _ARGUMENTS_FIELD)
        _show([f"{name}={value}" for name, value in environment.items()], _ENVIRONMENT_FIELD)
        _close_on_exec()
        status = _run(command)
    except BaseException:
        # Whatever streams it had.
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _set_threads(threads: str | None) -> None:
    """What libgomp reads when it is loaded; torch begins threads of its own for more than one."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(threads or len(os.sched_getaffinity(0))))


class Begun:
    """Says when a fork is another program: a descriptor of it is closed by then, as ``exec`` would."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        # Above what the program may inherit.
        self._writer = fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, HIGHEST)
        os.close(writer)

    def leave_to_child(self) -> None:
        os.close(self._reader)

    def wait(self) -> None:
        os.close(self._writer)
        os.read(self._reader, 1)
        os.close(self._reader)


def _run(command: Sequence[str]) -> int:
    module = Module.of(command)
    assert module is not None
    sys.argv, sys.orig_argv = [module.name, *module.arguments], list(command)
    safe = module.safe or bool(os.environ.get(_SAFE))
    sys.path[:] = [*([] if safe else [os.getcwd()]), *folders_of(os.environ), *search_path]
    # Other folders may have other siblings than the server found.
    siblings.siblings.cache_clear()
    sys.stdin = _input()
    sys.stdout, sys.stderr = _stream(sys.stdout, os.isatty(1)), _stream(sys.stderr, True)
    sys.modules["__main__"] = types.ModuleType("__main__")
    # What it runs is there when the server has imported it, which runpy would warn of.
    is_package = hasattr(sys.modules.get(module.name), "__path__")
    sys.modules.pop(f"{module.name}.__main__" if is_package else module.name, None)
    # It computes nothing, and keeps the one thread that forks need.
    if module.name in _STARTS_CHILDREN or module.arguments[:1] == ["serve"]:
        children._spawn = _spawn
    else:
        if module.name in _STARTS_OTHERS:
            _fork_others()
        _set_threads(os.environ.get(THREADS))
    status: object = 0
    try:
        runpy._run_module_as_main(module.name)  # type: ignore[attr-defined]
    except SystemExit as error:
        status = error.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return status if isinstance(status, int) else int(status is not None)


def _fork_others() -> None:
    """Let what a program starts be forks, of a server that is forked before the program has threads."""
    # Here alone: they import this module.
    from tests.forks import popen, server

    ours, theirs = popen.channel()
    if not os.fork():
        ours.close()
        # What the program was given, such as the channel of whoever started it, ends with the program.
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, HIGHEST)
        _show(["python", "-m", server.__name__], _ARGUMENTS_FIELD)
        server.serve(theirs)
    theirs.close()
    popen.SERVER.use(ours)
    popen.fork_all()


def _input() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))


def _stream(other: Any, by_line: bool) -> io.TextIOWrapper:
    """One with the same descriptor, into which nothing has been written."""
    unbuffered: bool = other.write_through
    raw = io.FileIO(other.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=other.encoding,
        errors=other.errors,
        line_buffering=by_line and not unbuffered,
        write_through=unbuffered,
    )


def _close_on_exec() -> None:
    for name in os.listdir("/proc/self/fd"):
        # One of them is the list's own.
        with suppress(OSError):
            if fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(int(name))


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    # As an interpreter does when it starts.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _show(words: Iterable[str], first_field: int) -> None:
    """Let ``proc(5)`` show the words: two fields of ``stat`` say where it reads them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[number - 3]) for number in (first_field, first_field + 1))
    data = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(data) > end - start:
        raise ValueError(f"{len(data)} bytes do not fit in the {end - start} that the server began with")
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


_exec = children._spawn


def _spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    actions: Sequence[tuple[object, ...]],
    heeded: set[signal.Signals],
) -> int:
    """As ``launch.children._spawn``, for a child that is a module of the service."""
    words = command[6:]
    if children._BOUND not in command or Module.of(words) is None or differs(environment):
        return _exec(command, environment, actions, heeded)  # type: ignore[arg-type]
    may_fork()
    parent = os.getpid()
    begun = Begun()
    if pid := os.fork():
        begun.wait()
        return pid
    try:
        begun.leave_to_child()
        _act(actions)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)
        become(words, environment)
    finally:
        os._exit(1)


def _act(actions: Sequence[tuple[Any, ...]]) -> None:
    """Do what ``posix_spawn`` is told to."""
    for kind, *words in actions:
        if kind == os.POSIX_SPAWN_OPEN:
            number, path, flags, mode = words
            own = os.open(path, flags, mode)
        else:
            assert kind == os.POSIX_SPAWN_DUP2
            own, number = words
        os.dup2(own, number)
        os.set_inheritable(number, True)
