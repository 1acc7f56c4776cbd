"""A worker process: python -m tests.rpc.rpc_worker NAMESPACE [echo|slow|later|second|other]

``echo`` answers at once, ``slow`` never, ``later`` never what says so in its ``param``, ``second`` after a
second of which it says that it has begun, ``other`` says that it serves another model. SIGTERM ends it as it
ends a real worker: out of discovery first, what is in flight finished.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec

from tessera import wire
from tessera.rpc import RpcSettings, Runtime, Server, set_environment_defaults
from tests.rpc.conftest import INFO, echoed


async def main(namespace: str, kind: str = "echo") -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def handle(message: wire.Request) -> wire.Reply:
        if isinstance(message, wire.Describe):
            return msgspec.structs.replace(INFO, fingerprint="bad" if kind == "other" else "good")
        if kind == "slow" or (kind == "later" and "later" in repr(message)):
            await asyncio.sleep(600)
        if kind == "second":
            print("begun", flush=True)
            await asyncio.sleep(1)
        return echoed(message)

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
