"""``python -m tessera.frontend``: serve HTTP until SIGTERM, then finish what is in flight."""

from __future__ import annotations

from tessera.garbage import keep_all, quick_imports

with quick_imports():
    import asyncio
    import logging
    import os
    import signal
    from collections.abc import Sequence

    import uvloop

    from tessera import tracing
    from tessera.checkpoint.source import SOURCE_VARIABLE
    from tessera.errors import DiscoveryLost, TesseraError
    from tessera.free_memory import give_back_free_memory, share_heaps
    from tessera.frontend.app import make_app
    from tessera.frontend.door import OpenDoor, open_doors
    from tessera.frontend.group import GROUP_VARIABLE
    from tessera.frontend.http.auth import API_KEYS_VARIABLE
    from tessera.frontend.http.server import HttpServer, SharedPort
    from tessera.frontend.http.tls import PASSWORD_VARIABLE, Certificate
    from tessera.frontend.media.fetch import bound_look_ups
    from tessera.frontend.service import Service
    from tessera.frontend.settings import FrontendSettings, parse
    from tessera.interpreter import SharedInterpreter
    from tessera.launch.variables import unknown
    from tessera.logs import LogFormat, log_as, log_settings, write_behind
    from tessera.process_exit import leave, when_told
    from tessera.rpc import DRAIN_PATIENCE_SECONDS, FORGOTTEN, set_environment_defaults, until_back
    from tessera.tasks import KEEPER


log = logging.getLogger("tessera.frontend")

# Between two tries to open models that discovery, for example, did not let be opened.
_AGAIN_SECONDS = 5.0


async def serve(settings: FrontendSettings, key_password: str | None = None) -> None:
    """Run one frontend until SIGTERM or SIGINT; raises ``DiscoveryLost`` when it cannot hear of workers."""
    tracing.start("frontend", settings.traces)
    certificate = Certificate.of(settings.tls, key_password)
    service = await Service.connect(settings)
    doors = open_doors(service)
    app = make_app(service, [api for door in doors for api in door.apis])
    server = HttpServer(
        app,
        host=settings.host,
        port=settings.port,
        drain_seconds=settings.drain_seconds,
        limits=settings.limits.connection,
        shared=SharedPort.of(settings.seat, service.group) if settings.seat else None,
        certificate=certificate,
        refuse=service.refuse_at_once,
        keys=service.keys,
    )

    def stop() -> None:
        if not service.draining.is_set():
            for model in service.models:
                model.workers.embed.hurry(DRAIN_PATIENCE_SECONDS)
        service.draining.set()
        server.should_exit = True

    when_told(stop)
    write_behind()
    for door in doors:
        await door.listen(certificate)
    drained = asyncio.create_task(_drain(service, doors), name="doors")
    if settings.models_file is not None:
        _follow_when_told(service)
    lost = asyncio.create_task(_lost(service))
    # An error of the wait itself ends the process, too: nobody would hear of a loss any more.
    lost.add_done_callback(lambda task: None if task.cancelled() else stop())
    sharing = SharedInterpreter()
    if (giving_back := give_back_free_memory()) is not None:
        service.tasks.add(giving_back)
    keep_all()
    await server.serve()
    await drained
    await service.close()
    for door in doors:
        door.close()
    sharing.cancel()
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    service.runtime.shutdown()
    if not lost.cancelled():
        raise lost.result()


async def _drain(service: Service, doors: Sequence[OpenDoor]) -> None:
    """Wait until the service drains, then until what came by the doors' own ports is answered."""
    await service.draining.wait()
    await asyncio.gather(*(door.drain(service.settings.drain_seconds) for door in doors))


def _follow_when_told(service: Service) -> None:
    """Read the file of models again at each SIGHUP; those that come meanwhile are one."""
    told = asyncio.Event()
    # What was told before anybody listened.
    told.set()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, told.set)

    async def follow() -> None:
        await told.wait()
        told.clear()
        try:
            followed = await service.follow()
        except Exception:
            # The keeper calls again.
            told.set()
            raise
        if not followed:
            asyncio.get_running_loop().call_later(_AGAIN_SECONDS, told.set)

    service.tasks.add(KEEPER.start("models", follow))


async def _lost(service: Service) -> DiscoveryLost:
    """Wait until no worker can be heard of any more, and then, with 503, until discovery answers."""
    error = await service.runtime.lost()
    log.critical("leaving as soon as discovery answers: %s", error)
    for model in service.models:
        for peers in model.workers.by_component.values():
            peers.expect_none()
    await until_back(service.settings.rpc.discovery_backend)
    return error


def main() -> int:
    share_heaps()
    # Before the rest, whose errors are logged, too.
    log_as("frontend", settings := log_settings())
    # A launcher may tell it to read its models again before it has read them.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    set_environment_defaults(json_log=settings.format is LogFormat.JSON)
    bound_look_ups()
    for sentence in unknown(os.environ):
        log.warning("%s", sentence)
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
