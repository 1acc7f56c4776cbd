"""``python -m tessera.worker.decoding.nursery``: a small process that gives birth to decoders.

It has opened the checkpoint and imported the decoders before the first image comes, so a decoder that died is
replaced within milliseconds, and all of them share its memory. It has one thread, because a fork copies
no other, and never looks at an image itself.
"""

from __future__ import annotations

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

from tessera.models import Model, open_model
from tessera.worker.decoding.child import serve
from tessera.worker.decoding.messages import Limits, mapped
from tessera.worker.decoding.sandbox import die_with_parent


def main(argv: list[str]) -> int:
    """``argv``: the control socket's descriptor, the checkpoint, the limits as JSON."""
    # The worker ends us by hanging up, after what is in flight; a Ctrl-C reaches us before that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=int(argv[0]))
    limits = msgspec.json.decode(argv[2], type=Limits)
    model = open_model(Path(argv[1]))
    Image.init()
    gc.freeze()
    control.send(b"ready")
    own = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, 2)
        if not message:
            return 0
        _reap()
        channel = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            # Killed meanwhile, the nursery cannot take its child with it.
            die_with_parent(own)
            control.close()
            _live(channel, descriptors[1], model, limits)
        channel.close()
        os.close(descriptors[1])
        # A descriptor of the process: its number may mean another one by the time it is to be killed.
        handle = os.pidfd_open(pid)
        socket.send_fds(control, [str(pid).encode()], [handle])
        os.close(handle)


def _live(channel: socket.socket, memory: int, model: Model, limits: Limits) -> None:
    status = 1
    try:
        serve(channel, mapped(memory), model, limits)
        status = 0
    except BrokenPipeError:
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        # Nothing of the nursery's own is to be run here.
        os._exit(status)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
