"""A second process for the hand-off tests: an outbox or an inbox behind a pipe of commands."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.errors import TesseraError
from tessera.transport.inbox import Inbox
from tessera.transport.kinds import nixl
from tessera.transport.kinds.nixl import NixlTransport
from tessera.transport.outbox import Outbox
from tessera.transport.settings import TransportSettings
from tessera.transport.slab.geometry import Geometry
from tessera.transport.slab.slab import Slot
from tessera.wire import Handle, ReaderInfo, SlabInfo

ROW_WIDTH = 64
BLOCK_ROWS = 16


def sample(seed: int, rows: int, dtype: torch.dtype = torch.float32, width: int = ROW_WIDTH) -> torch.Tensor:
    """Rows ``[rows, width]`` that two processes can both make."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype)


def outbox_config(**changes: Any) -> dict[str, Any]:
    """What an ``Outbox`` is made with: ``changes`` are of its arguments, its geometry and its settings."""
    geometry: dict[str, Any] = {
        "capacity_rows": 8 * BLOCK_ROWS,
        "block_rows": BLOCK_ROWS,
        "row_width": ROW_WIDTH,
    }
    geometry |= {name: changes.pop(name) for name in geometry if name in changes}
    dtype = str(changes.pop("dtype", torch.float32)).removeprefix("torch.")
    own = {
        name: changes.pop(name)
        for name in ("lease_seconds", "checksum", "nixl_interfaces")
        if name in changes
    }
    settings = TransportSettings(
        **({"kind": changes.pop("transport", "auto"), "lease_seconds": 30.0, "nixl_interfaces": ""} | own)
    )
    made = {"producer": "encoder-1", "geometry": Geometry(**geometry, dtype=dtype), "settings": settings}
    return made | changes


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.cpu().view(torch.uint8), right.cpu().view(torch.uint8))


def listening_addresses() -> set[str]:
    """The IPv4 addresses on which this process accepts TCP connections."""
    mine = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(os.readlink(fd))
    found = set()
    for line in Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        address, state, inode = (line.split()[column] for column in (1, 3, 9))
        if state == "0A" and f"socket:[{inode}]" in mine:
            packed = bytes.fromhex(address.partition(":")[0])
            found.add(socket.inet_ntoa(packed[:: 1 if sys.byteorder == "big" else -1]))
    return found


class Host:
    """What the child can be told to do; every method is one command."""

    def __init__(self) -> None:
        self.outbox: Outbox | None = None
        self.inbox: Inbox | None = None
        self.held: list[Slot] = []

    async def open_outbox(self, config: dict[str, Any]) -> tuple[SlabInfo, ...]:
        await self.close()
        self.outbox = Outbox(**config)
        return self.outbox.infos()

    async def publish(self, seed: int, rows: int, reader: ReaderInfo, timeout: float = 1.0) -> Handle:
        assert self.outbox is not None
        slot = await self.outbox.slab.acquire(rows, timeout=timeout)
        slot.rows.copy_(sample(seed, rows, slot.rows.dtype, slot.shape[1]))
        if self.outbox.slab.device.type == "cuda":
            torch.cuda.synchronize()
        return await self.outbox.publish(slot, reader)

    async def stats(self) -> Any:
        assert self.outbox is not None
        self.outbox.slab.sweep()
        return self.outbox.slab.stats()

    async def expire(self) -> None:
        """End every lease as if its time had run out."""
        assert self.outbox is not None
        for slot in self.outbox.slab._leased.values():
            slot.deadline = 0.0
        self.outbox.slab.sweep()

    async def drain(self, timeout: float) -> bool:
        assert self.outbox is not None
        return await self.outbox.slab.drain(timeout=timeout)

    async def open_inbox(
        self, kind: str, producer: str, infos: tuple[SlabInfo, ...], timeout: float = 5.0
    ) -> ReaderInfo:
        await self.close()
        settings = TransportSettings(kind=kind)
        nixl.READ_SECONDS = timeout
        self.inbox = Inbox("reader-2", settings, retry_seconds=0)
        self.inbox.connect(producer, infos)
        return self.inbox.reader_info(producer)

    async def fetch(self, handle: Handle) -> torch.Tensor:
        assert self.inbox is not None
        return await self.inbox.fetch(handle)

    async def watched_fetch(self, handle: Handle) -> tuple[str, int]:
        """How a fetch ended, and how often the loop had time for something else meanwhile."""
        beats = 0

        async def heartbeat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.001)
                beats += 1

        beating = asyncio.ensure_future(heartbeat())
        outcome = "delivered"
        try:
            await self.fetch(handle)
        except TesseraError as error:
            outcome = error.code
        beating.cancel()
        return outcome, beats

    async def reader_kinds(self) -> tuple[str, ...]:
        assert self.inbox is not None
        return self.inbox.reader_info("encoder-1").kinds

    async def staging(self) -> tuple[int, int]:
        """Reads given up and not over, and the pages of staging memory in use."""
        assert self.inbox is not None
        transport = self.inbox._transports["nixl"]
        assert isinstance(transport, NixlTransport) and transport._staging is not None
        transport._agent.reap()
        return transport._agent.quarantined, transport._staging.rows_space.used

    async def listening(self) -> set[str]:
        return listening_addresses()

    async def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    async def close(self) -> None:
        if self.outbox is not None:
            self.outbox.close()
        if self.inbox is not None:
            self.inbox.close()
        self.outbox = self.inbox = None

    async def serve(self, pipe: Connection) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                name, args = await loop.run_in_executor(None, pipe.recv)
            except EOFError:
                break
            try:
                answer = await getattr(self, name)(*args)
            except TesseraError as error:
                answer = error
            # Sent as a list: torch would pass a bare tensor by a shared-memory file of its own.
            if isinstance(answer, torch.Tensor):
                answer = answer.tolist()
            pipe.send(answer)
        await self.close()


def _run(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    asyncio.run(Host().serve(pipe))


def _context() -> multiprocessing.context.ForkServerContext:
    """Forks every peer from one process that has imported torch, which takes seconds, and nothing of UCX."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class Peer:
    """The parent's end. Commands may overlap only if they are awaited one after the other."""

    def __init__(self, **environment: str) -> None:
        context = _context()
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, os.environ | environment)
        self.process = context.Process(target=_run, args=arguments, daemon=True)
        with pytest.MonkeyPatch.context() as patch:
            # The first start begins the server, which finds its modules by this alone.
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            self.process.start()
        theirs.close()

    async def call(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        answer = await asyncio.to_thread(self._pipe.recv)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        self._pipe.close()
        self.process.join(60)
        if self.process.is_alive():
            self.kill()
        self.process.close()
