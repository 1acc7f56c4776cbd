"""``python -m tessera.worker``: start, warm up, serve, drain."""

from __future__ import annotations

from tessera.garbage import quick_imports

with quick_imports():
    import asyncio
    import logging
    import os
    import time
    from contextlib import suppress

    import torch
    import uvloop

    from tessera import tracing
    from tessera.checkpoint.source import SOURCE_VARIABLE
    from tessera.errors import DiscoveryLost, EngineDead, TesseraError
    from tessera.free_memory import give_back_free_memory
    from tessera.interpreter import SharedInterpreter
    from tessera.logs import LogFormat, log_as, log_settings, write_behind
    from tessera.process_exit import ENGINE_DEAD, leave, when_told
    from tessera.rpc import FORGOTTEN, Runtime, Server, set_environment_defaults, until_back
    from tessera.tasks import Left, run_until
    from tessera.worker import stall
    from tessera.worker.access_log import AccessLog
    from tessera.worker.embed import EmbedService
    from tessera.worker.metrics import WorkerMetrics
    from tessera.worker.roles import COMPONENT, Builder
    from tessera.worker.settings import WorkerSettings, parse
    from tessera.worker.sizes import share_of


log = logging.getLogger("tessera.worker")


# How long a worker whose engine has died waits for its last errors to be sent.
_LAST_WORDS_SECONDS = 2.0

# How long a worker that discovery has lost waits for the calls inside it, which came before that.
_FORGOTTEN_SECONDS = 5.0


async def serve(settings: WorkerSettings) -> None:
    """Run one worker until SIGTERM or SIGINT.

    Raises ``EngineDead`` when its engine cannot go on, ``DiscoveryLost`` when no caller can find it any more.
    """
    dead: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()

    def died(error: EngineDead) -> None:
        if not dead.done():
            dead.set_result(error)

    started = time.monotonic()
    stop = asyncio.Event()
    when_told(stop.set)
    write_behind()
    tracing.start(settings.mode.value, settings.traces)
    runtime = Runtime(settings.rpc)
    metrics = WorkerMetrics()
    metrics.set_info(settings.mode.value, settings.served_model_names[0])
    address = runtime.address(COMPONENT[settings.mode])
    addresses = [address]
    if settings.dynamo_model:
        # Imported here: it brings the frontend's package along, which no other worker needs.
        from tessera import dynamo_model

        addresses += dynamo_model.addresses(runtime, settings.served_model_names)
    for served in addresses:
        runtime.endpoint(served)
    name = f"{runtime.endpoint(address).connection_id():x}"
    builder = Builder(settings=settings, runtime=runtime, metrics=metrics, name=name, died=died, stop=stop)
    try:
        service = await run_until(stop.wait(), builder.build())
    except Left:
        runtime.shutdown()
        return

    access_log = AccessLog(address, service.handle, share=settings.access_log_share)
    server = Server(runtime, address, access_log.answer)
    server.expose_metrics(metrics.render)
    # Discovery may keep a worker waiting; a signal must not wait with it.
    servers = [server]
    if settings.dynamo_model and isinstance(service, EmbedService):
        pixels = settings.max_image_pixels
        servers += dynamo_model.model_servers(
            runtime, server, service.model, settings.served_model_names, max_image_pixels=pixels
        )

    async def stop_serving(timeout: float) -> None:
        await asyncio.gather(*(each.stop(timeout=timeout) for each in servers))
        access_log.flush()

    # Watched from now on: discovery may lose a worker that is only just registering.
    ending = asyncio.create_task(_ending(stop, dead, runtime))
    with suppress(Left):
        for each in servers:
            await run_until(asyncio.shield(ending), each.start())
    if not ending.done():
        log.info(
            "ready after %.1f s: %s worker %s serves %s at %s",
            time.monotonic() - started,
            settings.mode,
            name,
            settings.served_model_names[0],
            address,
        )
    loops = [stall.watch(service, settings, died), give_back_free_memory(), SharedInterpreter()]
    reason = await ending
    for loop in loops:
        if loop is not None:
            loop.cancel()
    if isinstance(reason, EngineDead):
        log.critical("leaving: %s", reason)
        await stop_serving(_LAST_WORDS_SECONDS)
        raise reason
    patience = settings.drain_seconds if reason is None else min(settings.drain_seconds, _FORGOTTEN_SECONDS)
    log.info("draining")
    await stop_serving(patience)
    if reason is not None:
        with suppress(Left):
            await run_until(stop.wait(), until_back(settings.rpc.discovery_backend))
    await service.drain(patience)
    await service.close()
    runtime.shutdown()
    access_log.flush()
    await asyncio.gather(*(each.closed() for each in servers))
    log.info("stopped")
    if reason is not None and not stop.is_set():
        raise reason


async def _ending(
    stop: asyncio.Event, dead: asyncio.Future[EngineDead], runtime: Runtime
) -> EngineDead | DiscoveryLost | None:
    """Wait until the worker cannot go on; returns why, or None when it was told to stop."""
    try:
        lost = await run_until(stop.wait(), run_until(asyncio.shield(dead), runtime.lost()))
    except Left:
        return None if stop.is_set() else dead.result()
    log.critical("leaving as soon as discovery answers: %s", lost)
    return lost


def main() -> int:
    # Before the rest, whose errors are logged, too; the name of the role follows once it is known.
    log_as("worker", early := log_settings())
    set_environment_defaults(json_log=early.format is LogFormat.JSON)
    from tessera.launch.variables import unknown

    for sentence in unknown(os.environ):
        log.warning("%s", sentence)
    try:
        settings = parse(source=os.environ.pop(SOURCE_VARIABLE, None))
        log_as(settings.mode.value, settings.log)
        threads = settings.stages.threads or share_of(settings).threads(torch.get_num_threads())
        torch.set_num_threads(threads)
        uvloop.run(serve(settings))
    except EngineDead as error:
        log.error("%s", error)
        tracing.stop(_LAST_WORDS_SECONDS)
        return ENGINE_DEAD
    except DiscoveryLost as error:
        log.error("%s", error)
        return FORGOTTEN
    except TesseraError as error:
        log.error("%s", error)
        return 1
    finally:
        tracing.stop()
    return 0


if __name__ == "__main__":
    leave(main())
