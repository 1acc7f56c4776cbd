"""``python -m tessera.sandbox.child``: a process that forks confined processes, and what those run.

The fork server makes the handler before the first file comes: it opens the checkpoint and imports what
decoding needs. A process that died is therefore replaced within milliseconds, and all share its memory. It
has one thread, because a fork copies no other, and it never reads a file itself.
"""

from __future__ import annotations

from tessera.garbage import quick_imports

with quick_imports():
    import contextlib
    import gc
    import importlib
    import math
    import os
    import resource
    import signal
    import socket
    import sys
    import traceback

    import msgspec

    from tessera.sandbox import seccomp
    from tessera.sandbox.confinement import confine, die_with_parent
    from tessera.sandbox.memory import (
        IN_MEMORY,
        MAX_BYTES,
        READY,
        READY_UNFILTERED,
        Handler,
        Limits,
        Memory,
        mapped,
    )


def main(argv: list[str]) -> int:
    """Run the fork server.

    ``argv``: the control socket's descriptor, the limits as JSON, what makes the handler as
    ``MODULE:NAME``, and its argument, which that reads.
    """
    # The pool ends this process by closing the socket, after the files in flight. Ctrl-C comes earlier.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=int(argv[0]))
    limits = msgspec.json.decode(argv[1], type=Limits)
    module, _, name = argv[2].partition(":")
    with quick_imports():
        handler: Handler = getattr(importlib.import_module(module), name)(argv[3])
    gc.freeze()
    filtered = seccomp.supported()
    control.send(READY if filtered else READY_UNFILTERED)
    own = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            return 0
        _reap()
        channel = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            # A fork server that was killed since then does not end this process any more.
            die_with_parent(own)
            control.close()
            _run(channel, descriptors[1], handler, limits, filtered)
        channel.close()
        os.close(descriptors[1])
        # Not the number alone: it may name another process by the time this one is to be killed.
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [message + f" {pid}".encode()], [pidfd])
        os.close(pidfd)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _run(channel: socket.socket, memory: int, handler: Handler, limits: Limits, filtered: bool) -> None:
    status = 1
    try:
        results = mapped(memory)
        confine(memory_bytes=limits.memory_bytes, filtered=filtered, threads=limits.threads)
        _serve(channel, results, handler, limits)
        status = 0
    except BrokenPipeError:
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        # Without the exit handlers of the fork server.
        os._exit(status)


def _serve(channel: socket.socket, memory: Memory, handler: Handler, limits: Limits) -> None:
    """Do one task after another until the pool closes the channel."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, 1)
        if not message:
            return
        _allow_cpu(limits.seconds)
        try:
            answer = handler.answer(memory, message, descriptors[0] if descriptors else IN_MEMORY)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(answer)


def _allow_cpu(seconds: float) -> None:
    """Be killed after so many more seconds of CPU time, rounded up; replaces what was allowed before."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
