"""Real runtimes with file discovery, each in a store and a namespace of its own."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tessera import wire
from tessera.rpc import Client, RpcSettings, Runtime, Server, set_environment_defaults
from tests.waiting import until

INFO = wire.WorkerInfo(
    role="embed", model="m", fingerprint="good", dtype="float32", width=4, row_width=4, images=True
)
FAILED = wire.Failure(code="internal_error", message="not set")

_namespaces = itertools.count()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """Where discovery keeps its files; the environment is as before afterwards, for other tests' services."""
    before = dict(os.environ)
    os.environ["DYN_FILE_KV"] = str(tmp_path / "discovery")
    set_environment_defaults()
    yield tmp_path / "discovery"
    os.environ.clear()
    os.environ.update(before)


@dataclass
class Deployment:
    """A namespace with the runtimes, servers and processes that a test starts in it."""

    store: Path
    namespace: str
    _cleanup: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    @property
    def config(self) -> RpcSettings:
        return RpcSettings(namespace=self.namespace)

    @property
    def address(self) -> str:
        return f"{self.namespace}.embed.generate"

    def runtime(self) -> Runtime:
        runtime = Runtime(self.config)

        async def stop() -> None:
            runtime.shutdown()

        self._cleanup.append(stop)
        return runtime

    async def serve(
        self, handler: Callable[[wire.Request], Awaitable[wire.Reply]], *, check_every: float = 2.0
    ) -> Server:
        server = Server(self.runtime(), self.address, handler)
        await server.start(check_every=check_every)

        async def stop() -> None:
            with suppress(Exception):
                await server.stop(timeout=0.1)

        self._cleanup.append(stop)
        return server

    async def client(self, instances: int = 1) -> Client:
        client = await Client.connect(self.runtime(), self.address)
        await until(lambda: len(client.instances()) >= instances)
        return client

    async def spawn(self, *arguments: str) -> asyncio.subprocess.Process:
        """A worker process, see ``rpc_worker``; returns when it serves."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.rpc.rpc_worker", self.namespace, *arguments),
            stdout=asyncio.subprocess.PIPE,
        )

        async def stop() -> None:
            if process.returncode is None:
                # A frozen process gets the signal when it goes on.
                process.send_signal(signal.SIGKILL)
            await process.wait()

        self._cleanup.append(stop)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line.startswith(b"serving"), line
        return process

    async def call_from_elsewhere(
        self, instance: int, *params: str, size: int = 1
    ) -> asyncio.subprocess.Process:
        """A caller of its own process, see ``rpc_caller``."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.rpc.rpc_caller", self.namespace, str(instance), str(size), *params)
        )

        async def stop() -> None:
            if process.returncode is None:
                process.kill()
            await process.wait()

        self._cleanup.append(stop)
        return process

    async def close(self) -> None:
        for stop in reversed(self._cleanup):
            await stop()
        # The runtime's threads still call back a moment later.
        await asyncio.sleep(0.05)


@pytest.fixture
async def deployment(store: Path) -> AsyncIterator[Deployment]:
    made = Deployment(store, f"rpc{next(_namespaces)}")
    yield made
    await made.close()


def echo(size: int = 1, param: str = "input[0]") -> wire.EmbedRequest:
    """A request with ``size`` bytes of tokens."""
    return wire.EmbedRequest(
        request_id="r", items=(wire.Item(tokens=b"t" * size, param=param),), timeout_ms=60_000
    )


def echoed(message: wire.Request) -> wire.EmbedReply:
    """What an echoing handler answers: the tokens, as if they were rows."""
    assert isinstance(message, wire.EmbedRequest)
    return wire.EmbedReply(
        outputs=(wire.OutputRows(rows=b"".join(item.tokens for item in message.items), norms=b"", width=1),),
        counts=(1,) * len(message.items),
        cached_tokens=(0,) * len(message.items),
        timings=wire.Timings(),
    )


async def echoing(message: wire.Request) -> wire.Reply:
    return INFO if isinstance(message, wire.Describe) else echoed(message)
