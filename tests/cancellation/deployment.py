"""A whole service in this process and on this loop: both doors, workers, real runtime and sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ports import free_ports

from tessera.errors import EngineDead
from tessera.frontend.app import make_app
from tessera.frontend.door import open_doors
from tessera.frontend.http.server import HttpServer
from tessera.frontend.service import Service
from tessera.frontend.settings import parse as parse_frontend
from tessera.rpc import Runtime, Server
from tessera.worker.access_log import AccessLog
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.roles import COMPONENT, Builder
from tessera.worker.settings import parse as parse_worker
from tests.e2e.service import MODEL
from tests.waiting import until

# A lease that nobody gives back is held for longer than any test waits.
_ENGINE = """transport: {kind: %s, checksum: true, lease_seconds: 600}
preprocess: threads
vision: {max_queue_seconds: 600}
text: {max_queue_seconds: 600}
"""


@dataclass(frozen=True, slots=True)
class InProcess:
    """Where it answers, and the frontend's own parts."""

    port: int
    grpc_port: int
    service: Service


@asynccontextmanager
async def in_process(
    checkpoint: Path, folder: Path, *, roles: tuple[str, ...] = ("agg",), transport: str = "auto"
) -> AsyncIterator[InProcess]:
    """``roles`` are of the workers, one each."""
    engine = folder / "engine.yaml"
    engine.write_text(_ENGINE % transport)
    namespace = f"stopped{os.getpid()}-{folder.name}".replace("_", "-")
    port, grpc_port = free_ports(2)
    async with AsyncExitStack() as stack:
        for role in roles:
            await stack.enter_async_context(_worker(checkpoint, engine, namespace, role))
        flags = ["--port", str(port), "--grpc-port", str(grpc_port), "--result-cache-mb", "8"]
        flags += ["--allow-private-media", "--worker-wait-seconds", "0"]
        settings = parse_frontend([*_common(checkpoint, namespace), *flags])
        service = await Service.connect(settings)
        doors = open_doors(service)
        app = make_app(service, [api for door in doors for api in door.apis])
        server = HttpServer(
            app,
            host="127.0.0.1",
            port=port,
            drain_seconds=5,
            limits=settings.limits.connection,
            refuse=service.refuse_at_once,
            keys=service.keys,
        )
        serving = asyncio.create_task(server.serve())
        for door in doors:
            await door.listen(None)
        components = ["encode" if role == "encode" else "embed" for role in roles]
        (model,) = service.models
        peers = [model.workers.by_component[component] for component in components]
        await until(lambda: server.started and all(one.ready for one in peers))
        try:
            yield InProcess(port, grpc_port, service)
        finally:
            for door in doors:
                await door.drain(0.1)
            server.should_exit = True
            await serving
            await service.close()
            for door in doors:
                door.close()
            service.runtime.shutdown()
    # The runtime's threads still call back a moment later.
    await asyncio.sleep(0.1)


def _common(checkpoint: Path, namespace: str) -> list[str]:
    return ["--model-path", str(checkpoint), "--served-model-name", MODEL, "--namespace", namespace]


@asynccontextmanager
async def _worker(checkpoint: Path, engine: Path, namespace: str, role: str) -> AsyncIterator[None]:
    settings = parse_worker(
        [*_common(checkpoint, namespace), "--disaggregation-mode", role, "--extra-engine-args", str(engine)]
    )
    runtime, metrics, stop = Runtime(settings.rpc), WorkerMetrics(), asyncio.Event()
    address = runtime.address(COMPONENT[settings.mode])
    name = f"{runtime.endpoint(address).connection_id():x}"

    def died(error: EngineDead) -> None:
        raise AssertionError(error)

    builder = Builder(settings=settings, runtime=runtime, metrics=metrics, name=name, died=died, stop=stop)
    service = await builder.build()
    server = Server(runtime, address, AccessLog(address, service.handle, linger=0.0).answer)
    await server.start()
    try:
        yield
    finally:
        await server.stop(timeout=1)
        await service.close()
        runtime.shutdown()
