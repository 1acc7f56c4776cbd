"""``python -m tests.forks.probe [FILE]``: write what a program finds when it begins, a child to FILE."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from tessera.launch.children import collect, spawn
from tessera.siblings import MODELS, siblings
from tests.proc import command_line

# Signals 32 and 33, which posix_spawn leaves ignored.
_OF_THE_LIBRARY = 3 << 31


def main() -> None:
    status = Path("/proc/self/status").read_text()
    found = {
        "arguments": [sys.argv[1:], sys.orig_argv, command_line(os.getpid()), __name__],
        "environment": dict(os.environ),
        "shown": sorted(Path("/proc/self/environ").read_text().rstrip("\0").split("\0")),
        "folder": [os.getcwd(), tempfile.gettempdir(), sys.path],
        "parent": os.getppid(),
        "session": os.getsid(0) == os.getpid(),
        "kernel": [line for line in status.splitlines() if line.startswith(("Threads", "Umask"))],
        "signals": [
            int(mask, 16) & ~_OF_THE_LIBRARY for mask in re.findall(r"Sig(?:Blk|Ign|Cgt):\t(\w+)", status)
        ],
        "handlers": [
            str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
        ],
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if _is_open(int(name))),
        "streams": [(s.encoding, s.errors, s.line_buffering, s.fileno()) for s in (sys.stdout, sys.stderr)],
        "families": [entry.name for entry in siblings(MODELS)],
        "input": sys.stdin.read(),
        "collects": gc.isenabled(),
    }
    print(json.dumps(found), flush=True)
    if len(sys.argv) > 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        inherited = os.memfd_create("inherited")
        environment = os.environ | {"TESSERA_CHILD": "1"}
        command = [sys.executable, "-m", "tests.forks.probe"]
        child = spawn(command, environment, output=Path(sys.argv[1]), descriptors=[inherited])
        while (status_of_child := collect(child)) is None:
            signal.sigtimedwait((), 0.01)
        assert status_of_child == 3
    sys.exit(3)


def _is_open(descriptor: int) -> bool:
    """Not that which the list itself was read by."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
