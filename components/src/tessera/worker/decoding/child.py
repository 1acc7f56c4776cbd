"""``python -m tessera.worker.decoding.child``: a process that forks decoders, and what a decoder runs.

The fork server opens the checkpoint and imports what decoding needs before the first image comes. A decoder
that died is therefore replaced within milliseconds, and all decoders share its memory. It has one thread,
because a fork copies no other, and it never reads an image itself.
"""

from __future__ import annotations

from tessera.quick_imports import quick_imports

with quick_imports():
    import contextlib
    import gc
    import os
    import signal
    import socket
    import sys
    import traceback
    from pathlib import Path

    import msgspec
    from PIL import Image

    from tessera.errors import EngineFailed, PayloadTooLarge, TesseraError
    from tessera.models import Model, open_model
    from tessera.models.base import UInt8Array
    from tessera.worker.decoding.messages import (
        MAX_BYTES,
        Answer,
        Limits,
        Refusal,
        Task,
        decode_task,
        encode,
        mapped,
    )
    from tessera.worker.decoding.pool import decode, write
    from tessera.worker.decoding.sandbox import allow_cpu, confine, die_with_parent


_MAX_MESSAGE = 4096


def main(argv: list[str]) -> int:
    """Run the fork server.

    ``argv``: the control socket's descriptor, the checkpoint, its options and the limits as JSON.
    """
    # The worker ends this process by closing the socket, after the images in flight. Ctrl-C comes earlier.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=int(argv[0]))
    limits = msgspec.json.decode(argv[3], type=Limits)
    model = open_model(Path(argv[1]), msgspec.json.decode(argv[2]))
    Image.init()
    gc.freeze()
    control.send(b"ready")
    own = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            return 0
        _reap()
        channel = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            # A fork server that was killed since then does not end this decoder any more.
            die_with_parent(own)
            control.close()
            _run(channel, descriptors[1], model, limits)
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


def _run(channel: socket.socket, memory: int, model: Model, limits: Limits) -> None:
    status = 1
    try:
        _serve(channel, mapped(memory), model, limits)
        status = 0
    except BrokenPipeError:
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        # Without the exit handlers of the fork server.
        os._exit(status)


def _serve(channel: socket.socket, memory: UInt8Array, model: Model, limits: Limits) -> None:
    """Decode one image after another until the worker closes the channel.

    Pixels are left in ``memory``, which the worker has mapped as well.
    """
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
        return write(memory, decode(model, data, param=task.param, max_pixels=limits.max_pixels))
    except MemoryError:
        error: TesseraError = PayloadTooLarge(
            f"{task.param}: decoding the image takes more than {limits.memory_bytes >> 20} MiB",
            param=task.param,
        )
    except TesseraError as refused:
        error = refused
    except Exception as failed:  # a defect of the family's code: the worker is told, and the decoder stays
        error = EngineFailed(f"preprocessing failed: {type(failed).__name__}: {failed}", param=task.param)
    return Refusal(code=error.code, message=error.message[:_MAX_MESSAGE], param=error.param)


def _read(descriptor: int, size: int) -> bytes:
    try:
        return os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
