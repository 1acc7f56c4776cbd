"""``python -m tessera.worker``: start, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch
import uvloop

from tessera import wire
from tessera.config import WorkerConfig
from tessera.errors import TesseraError
from tessera.logs import log_as
from tessera.rpc import Runtime, Server, set_environment_defaults
from tessera.worker.arguments import parse
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.roles import COMPONENT, Builder

T = TypeVar("T")

log = logging.getLogger("tessera.worker")


async def serve(config: WorkerConfig) -> None:
    """Run one worker until SIGTERM or SIGINT."""
    started = time.monotonic()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runtime = Runtime(config.rpc)
    metrics = WorkerMetrics()
    metrics.describe(config.mode.value, config.served_model_name)
    address = runtime.address(COMPONENT[config.mode])
    name = f"{runtime.endpoint(address).connection_id():x}"
    builder = Builder(config=config, runtime=runtime, metrics=metrics, name=name)
    service = await _unless(stop, builder.build())
    if service is None:
        runtime.shutdown()
        return

    async def answer(request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Inspect):
            return metrics.state()
        return await service.handle(request)

    server = Server(runtime, address, answer)
    server.expose_metrics(metrics.render)
    await server.start()
    log.info(
        "ready after %.1f s: %s worker %s serves %s at %s",
        time.monotonic() - started,
        config.mode,
        name,
        config.served_model_name,
        address,
    )
    await stop.wait()
    log.info("draining")
    await server.stop(timeout=config.drain_seconds)
    await service.drain(config.drain_seconds)
    await service.close()
    runtime.shutdown()
    await server.closed()
    log.info("stopped")


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None when ``stop`` came first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


def main() -> int:
    set_environment_defaults()
    # The name of the role follows once it is known.
    log_as("worker")
    try:
        config = parse()
        log_as(config.mode.value)
        torch.set_num_threads(config.stages.threads or torch.get_num_threads())
        uvloop.run(serve(config))
    except TesseraError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
