"""``python -m tessera.frontend``: serve HTTP until SIGTERM, then finish what is in flight."""

from __future__ import annotations

from tessera.garbage import keep_all, quick_imports

with quick_imports():
    import asyncio
    import logging
    import os
    import signal
    from collections.abc import Callable

    import uvloop

    from tessera import tracing
    from tessera.checkpoint.source import SOURCE_VARIABLE
    from tessera.errors import DiscoveryLost, TesseraError
    from tessera.frontend.app import make_app
    from tessera.frontend.group import GROUP_VARIABLE
    from tessera.frontend.http.auth import API_KEYS_VARIABLE
    from tessera.frontend.http.server import HttpServer, SharedPort
    from tessera.frontend.http.tls import PASSWORD_VARIABLE, Certificate
    from tessera.frontend.kserve.inference import Inference
    from tessera.frontend.service import Service
    from tessera.frontend.settings import FrontendSettings, parse
    from tessera.logs import LogFormat, log_as, log_settings, write_behind
    from tessera.process_exit import leave, when_told
    from tessera.rpc import DRAIN_PATIENCE_SECONDS, FORGOTTEN, set_environment_defaults, until_back


log = logging.getLogger("tessera.frontend")


async def serve(settings: FrontendSettings, key_password: str | None = None) -> None:
    """Run one frontend until SIGTERM or SIGINT; raises ``DiscoveryLost`` when it cannot hear of workers."""
    tracing.start("frontend", settings.traces)
    certificate = Certificate.of(settings.tls, key_password)
    service = await Service.connect(settings)
    inference = Inference(service)
    app = make_app(service, inference)
    server = HttpServer(
        app,
        host=settings.host,
        port=settings.port,
        drain_seconds=settings.drain_seconds,
        limits=settings.limits.connection,
        shared=SharedPort.of(settings.seat, service.group) if settings.seat else None,
        certificate=certificate,
        refuse=app.refuse_at_once,
    )

    def stop() -> None:
        if not service.draining.is_set():
            for model in service.models:
                model.workers.embed.hurry(DRAIN_PATIENCE_SECONDS)
        service.draining.set()
        server.should_exit = True

    when_told(stop)
    write_behind()
    if settings.kserve.grpc_port:
        await _serve_grpc(service, inference, certificate)
    if settings.models_file is not None:
        _follow_when_told(service)
    lost = asyncio.create_task(_leave_when_lost(service, stop))
    keep_all()
    await server.serve()
    await service.close()
    inference.close()
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    service.runtime.shutdown()
    if not lost.cancelled():
        raise lost.result()


async def _serve_grpc(service: Service, inference: Inference, certificate: Certificate | None) -> None:
    """Answer KServe calls by gRPC until the service drains, and those under way until they are done."""
    # Half a second of imports for those who have no such port.
    from tessera.frontend.kserve.grpc_server import GrpcServer

    server = GrpcServer(service, inference, certificate)
    await server.start()

    async def drain() -> None:
        await service.draining.wait()
        await server.stop(service.settings.drain_seconds)

    service.tasks.add(asyncio.create_task(drain(), name="gRPC"))


def _follow_when_told(service: Service) -> None:
    """Read the file of models again at each SIGHUP; those that come meanwhile are one."""
    told = asyncio.Event()
    # What was told before anybody listened.
    told.set()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, told.set)

    async def follow() -> None:
        while True:
            await told.wait()
            told.clear()
            await service.follow()

    service.tasks.add(asyncio.create_task(follow(), name="models"))


async def _leave_when_lost(service: Service, stop: Callable[[], None]) -> DiscoveryLost:
    """Stop when no worker can be heard of any more, but not before discovery answers: until then say 503."""
    error = await service.runtime.lost()
    log.critical("leaving as soon as discovery answers: %s", error)
    for model in service.models:
        for peers in model.workers.by_component.values():
            peers.expect_none()
    await until_back(service.settings.rpc.discovery_backend)
    stop()
    return error


def main() -> int:
    # Before the rest, whose errors are logged, too.
    log_as("frontend", settings := log_settings())
    # A launcher may tell it to read its models again before it has read them.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    set_environment_defaults(json_log=settings.format is LogFormat.JSON)
    try:
        variables = (API_KEYS_VARIABLE, GROUP_VARIABLE, SOURCE_VARIABLE, PASSWORD_VARIABLE)
        keys, seat, source, password = (os.environ.pop(name, None) for name in variables)
        uvloop.run(serve(parse(api_keys=keys, seat=seat, source=source), password))
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
