"""``python -m tessera.corpus.engine_process FD``: an engine for the run that started this process.

It ends when the run does, however that ends.
"""

from __future__ import annotations

from tessera.quick_imports import quick_imports

with quick_imports():
    import asyncio
    import logging
    import signal
    import socket
    import sys
    from contextlib import suppress
    from typing import Any, Final

    import uvloop

    from tessera.corpus.engine import Engine, watch
    from tessera.corpus.frames import Channel, Embed, Frame, Made, Ready, Refused, Start, Tell, Used
    from tessera.errors import EngineDead, TesseraError
    from tessera.logs import log_as, log_settings
    from tessera.process_exit import ENGINE_DEAD, leave
    from tessera.sandbox.confinement import die_with_parent
    from tessera.worker.idle_memory import give_back_when_idle
    from tessera.worker.settings import parse

log = logging.getLogger("tessera.corpus.engine")

# Shorter than what an engine sets for a service (``engine/process.py``): the loop of this process is busier.
# On an H200 texts of 32 tokens came at 9,375/s; at 8,979 with 0.2 ms.
_SWITCH_SECONDS: Final = 0.00005


async def serve(descriptor: int) -> int:
    """Answer until the run goes away; the exit status."""
    channel = await Channel.of(socket.socket(fileno=descriptor))
    start = await channel.receive()
    if not isinstance(start, Start):
        return 0
    dead: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()

    def died(error: EngineDead) -> None:
        if not dead.done():
            dead.set_result(error)

    try:
        worker = await asyncio.to_thread(parse, start.flags, source=start.source or None)
        engine = await Engine.start(worker, start.vectors, died)
    except TesseraError as error:
        await channel.send(Refused(error.code, error.message))
        return 1
    sys.setswitchinterval(_SWITCH_SECONDS)
    await channel.send(Ready(engine.served))
    helpers = [
        asyncio.create_task(watch(engine, worker, died)),
        asyncio.create_task(give_back_when_idle()),
    ]
    answering: set[asyncio.Task[None]] = set()

    async def answer(frame: Embed | Tell) -> None:
        try:
            made: Frame = await (_made(engine, frame) if isinstance(frame, Embed) else _used(engine))
        except TesseraError as error:
            made = Refused(error.code, error.message)
        with suppress(ConnectionError):
            await channel.send(made)

    async def receive() -> None:
        while isinstance(frame := await channel.receive(), Embed | Tell):
            task = asyncio.create_task(answer(frame))
            answering.add(task)
            task.add_done_callback(answering.discard)

    receiving = asyncio.create_task(receive())
    either: list[asyncio.Future[Any]] = [receiving, dead]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if dead.done():
        why = dead.result()
        log.critical("leaving: %s", why)
        with suppress(ConnectionError):
            await channel.send(Refused(why.code, why.message))
        return ENGINE_DEAD
    for task in (*helpers, *answering):
        task.cancel()
    await engine.close()
    return 0


async def _made(engine: Engine, frame: Embed) -> Made:
    found = await engine.embed(frame.items)
    return Made(
        number=frame.number,
        rows=found.rows.astype("<f4", copy=False).tobytes(),
        counts=list(found.counts),
        tokens=list(found.tokens),
        reasons=dict(found.reasons),
    )


async def _used(engine: Engine) -> Used:
    usage = await engine.usage()
    return Used(usage.engine_seconds, usage.images, usage.cached_images)


def main() -> int:
    die_with_parent()
    # A terminal sends it to the whole group; the run says when it is over.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_as("engine", log_settings(sys.argv[2:]))
    return uvloop.run(serve(int(sys.argv[1])))


if __name__ == "__main__":
    leave(main())
