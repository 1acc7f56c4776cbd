"""A process whose calls meet: python -m tests.rpc.rpc_caller NAMESPACE INSTANCE SIZE PARAM...

Each has SIZE bytes of tokens. It ends when all have been answered, with an error when one is not.
"""

from __future__ import annotations

import asyncio
import sys

from tessera.rpc import Client, RpcSettings, Runtime, set_environment_defaults
from tests.rpc.conftest import echo
from tests.waiting import until


async def main(namespace: str, instance: str, size: str, *params: str) -> None:
    runtime = Runtime(RpcSettings(namespace=namespace))
    client = await Client.connect(runtime, runtime.address("embed"))
    await until(client.instances)
    calls = [client.call(int(instance), echo(int(size), param), timeout=60) for param in params]
    await asyncio.gather(*calls)
    runtime.shutdown()


if __name__ == "__main__":
    set_environment_defaults()
    asyncio.run(main(*sys.argv[1:]))
