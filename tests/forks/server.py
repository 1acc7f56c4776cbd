"""``python -m tests.forks.server DESCRIPTOR``: import what the service imports, and fork for who asks.

It ends with the other end of its socket.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from tests.forks.program import (
    HIGHEST,
    Begun,
    become,
    folders_of,
    imported_with,
    may_fork,
    search_path,
)

# What forks become, and what they import when they begin.
MODULES = (
    "tessera.cli",
    "tessera.launch",
    "tessera.models",
    "tessera.frontend",
    "tessera.worker",
    "tessera.worker.together",
    "tessera.local.engine_process",
    "tessera.local.worker_process",
    "tessera.sandbox.child",
    "tessera_corpus.sources.read_process",
    "tests.e2e.faults.reader",
    "tests.forks.probe",
)
_EARLY = (
    "tessera.cli.__main__",
    "tessera.launch.__main__",
    "tessera.launch.scripts",
    "tessera.frontend.__main__",
    "tessera.worker.__main__",
    "tessera.worker.together",
    "tessera.local.engine_process",
    "tessera.local.worker_process",
    "tessera.sandbox.child",
    "tessera.worker.decoding",
    "tessera_corpus.pdf",
    "tessera_corpus.sources.parquet",
    "tessera.engine.torch.text",
    "tessera.engine.torch.vision",
)
LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """``descriptors`` are the numbers that the descriptors of the message have in the process."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    mask: int
    descriptors: tuple[int, ...]
    new_session: bool
    before: Callable[[], object] | None
    """What the process does before it becomes the program."""


def main() -> NoReturn:
    imported_with.clear()
    imported_with.update(os.environ)
    del imported_with["ROOM"]
    own = folders_of(os.environ)
    search_path.extend(folder for folder in sys.path[1:] if folder not in own)
    for name in _EARLY:
        importlib.import_module(name)
    # Whoever opens a checkpoint asks all of them for it: 120 modules, 0.15 s of processor time each time.
    importlib.import_module("tessera.models").families()
    # Each decoder does: 50 modules of Pillow.
    importlib.import_module("tessera.imaging").load_codecs()
    # Its variables are those of each fork.
    assert "huggingface_hub" not in sys.modules
    gc.collect()
    gc.freeze()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    serve(channel)


def serve(channel: socket.socket) -> NoReturn:
    """Fork for whoever has the other end of the channel, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, LONGEST, 64)
        if not data:
            os._exit(0)
        pid = _fork(pickle.loads(data), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(pickle.dumps(pid))


def _fork(request: Request, descriptors: list[int]) -> int:
    """Fork a fork, whose parent ends: the next one is who asks, the subreaper of its children's children."""
    may_fork()
    told, tell = os.pipe()
    ended, end = os.pipe()
    begun = Begun()
    if not (middle := os.fork()):
        if pid := os.fork():
            os.write(tell, pid.to_bytes(4, "little"))
            os._exit(0)
        try:
            begun.leave_to_child()
            os.close(end)
            # Until its parent has ended, and who asked is it.
            os.read(ended, 1)
            _become(request, descriptors)
        finally:
            os._exit(1)
    os.waitpid(middle, 0)
    os.close(end)
    begun.wait()
    pid = int.from_bytes(os.read(told, 4), "little")
    for descriptor in (told, tell, ended):
        os.close(descriptor)
    return pid


def _become(request: Request, descriptors: list[int]) -> NoReturn:
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGHEST) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for copy, number in zip(copies, request.descriptors, strict=True):
        os.dup2(copy, number)
    os.chdir(request.folder)
    os.umask(request.mask)
    if request.new_session:
        os.setsid()
    if request.before is not None:
        request.before()
    become(request.command, request.environment)


if __name__ == "__main__":
    main()
