"""A worker process: python -m tests.rpc.rpc_worker NAMESPACE [echo|slow|later|second|other|broken]

``echo`` answers at once, ``slow`` never, ``later`` never what says so in its ``param``, ``second`` after two
seconds. Of each call ``slow`` and ``second`` say that it has begun. ``other`` says that it serves another
model, ``broken`` dies at the third piece of a long reply. SIGTERM ends it as it ends a real worker: out of
discovery first, what is in flight finished.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from tessera import wire
from tessera.rpc import RpcSettings, Runtime, Server, set_environment_defaults
from tessera.rpc.pieces import Cut
from tests.rpc.conftest import INFO, echoed


def die_at_third(cut: Callable[[Cut], bytes]) -> Callable[[Cut], bytes]:
    pieces = itertools.count(1)

    def next_piece(payload: Cut) -> bytes:
        if next(pieces) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return cut(payload)

    return next_piece


async def main(namespace: str, kind: str = "echo") -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def handle(message: wire.Request) -> wire.Reply:
        if isinstance(message, wire.Describe):
            return msgspec.structs.replace(INFO, fingerprint="bad" if kind == "other" else "good")
        if kind in ("slow", "second"):
            print("begun", flush=True)
        if kind == "slow" or (kind == "later" and "later" in repr(message)):
            await asyncio.sleep(600)
        if kind == "second":
            await asyncio.sleep(2)
        return echoed(message)

    if kind == "broken":
        Cut.next = die_at_third(Cut.next)  # type: ignore[method-assign]
    runtime = Runtime(RpcSettings(namespace=namespace))
    server = Server(runtime, runtime.address("embed"), handle)
    if kind == "unready":
        print("serving nothing yet", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    await server.start(check_every=0.2)
    print(f"serving {server.instance}", flush=True)
    await stop.wait()
    await server.stop(timeout=20)
    runtime.shutdown()


if __name__ == "__main__":
    set_environment_defaults()
    asyncio.run(main(*sys.argv[1:]))
