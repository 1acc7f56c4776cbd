"""A reader of vision rows in a process of its own: ``python -m tests.e2e.faults.reader KIND IMAGE INSTANCE``.

Asks one encode worker of the running service for an image, says ``handle`` once it has one, waits for a line
on its input, and says what reading the rows gave: ``rows`` or the code of the error.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from blake3 import blake3

from tessera import wire
from tessera.errors import TesseraError, Unavailable
from tessera.rpc import Client, RpcSettings, Runtime, set_environment_defaults
from tessera.transport.inbox import Inbox
from tessera.transport.settings import TransportSettings
from tests.waiting import until


async def _describe(client: Client, wanted: int) -> wire.Reply:
    # Discovery may not have told this process of it yet.
    return await until(lambda: client.call(wanted, wire.Describe(), timeout=10), despite=Unavailable)


async def read(kind: str, data: bytes, wanted: int) -> None:
    runtime = Runtime(RpcSettings())
    client = await Client.connect(runtime, runtime.address("encode"))
    info = await _describe(client, wanted)
    assert isinstance(info, wire.WorkerInfo)
    inbox = Inbox("reader", TransportSettings(kind=kind))
    producer = f"{wanted:x}"
    inbox.connect(producer, info.slabs)
    image = wire.Image(digest=blake3(data).digest(), data=data, units=1, rows=64, param="input[0]")
    request = wire.EncodeRequest(
        request_id="r", image=image, timeout_ms=20_000, reader=inbox.reader_info(producer), call="reader-1"
    )
    reply = await client.call(wanted, request, timeout=20)
    assert isinstance(reply, wire.EncodeReply) and reply.handle.checksum
    print(f"handle {reply.handle.kind}", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    try:
        rows = await inbox.fetch(reply.handle)
        print(f"rows {tuple(rows.shape)}", flush=True)
    except TesseraError as error:
        print(f"error {error.code}", flush=True)
    inbox.close()
    runtime.shutdown()


if __name__ == "__main__":
    set_environment_defaults()
    asyncio.run(read(sys.argv[1], Path(sys.argv[2]).read_bytes(), int(sys.argv[3])))
