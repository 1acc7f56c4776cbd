"""``python -m tessera.local.worker_process FD``: a worker for the process that started it.

An interpreter of its own: the one that makes prompts of ten thousand texts a second would keep the engine
waiting each time it has something to launch.
"""

from __future__ import annotations

from tessera.garbage import quick_imports

with quick_imports():
    import asyncio
    import sys

    import torch
    import uvloop

    from tessera import wire
    from tessera.errors import ProtocolError, TesseraError
    from tessera.local.messages import Answer, Ask, AskUsage, First, Load, Loaded, Question, Replied, Used
    from tessera.local.parent import Died, answer_parent, belong_to_parent
    from tessera.local.usage import Usage
    from tessera.logs import LogFormat, log_as, log_settings
    from tessera.process_exit import leave
    from tessera.rpc import Runtime, Server, set_environment_defaults
    from tessera.worker import stall
    from tessera.worker.metrics import WorkerMetrics
    from tessera.worker.roles import COMPONENT, Builder, Service
    from tessera.worker.settings import Mode, WorkerSettings, parse
    from tessera.worker.sizes import share_of


class Worker:
    """Implements ``Answerer`` with an engine of this process."""

    begun = Loaded()

    def __init__(
        self,
        service: Service,
        settings: WorkerSettings,
        metrics: WorkerMetrics,
        runtime: Runtime | None,
        died: Died,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._runtime = runtime
        self._watching = stall.watch(service, settings, died)

    @classmethod
    async def start(cls, first: First, died: Died) -> Worker:
        """Load and warm. Raises ``ConfigError`` and ``CheckpointError`` for what cannot run here."""
        if not isinstance(first, Load):
            raise ProtocolError(f"a worker was sent {type(first).__name__} first")
        settings = await asyncio.to_thread(parse, first.flags, source=first.source or None)
        torch.set_num_threads(settings.stages.threads or share_of(settings).threads(torch.get_num_threads()))
        # Of the two stages one finds the other by Dynamo; both in one process need nobody.
        runtime = None if settings.mode is Mode.AGG else Runtime(settings.rpc)
        name, metrics = "local", WorkerMetrics()
        if runtime is not None:
            address = runtime.address(COMPONENT[settings.mode])
            name = f"{runtime.endpoint(address).connection_id():x}"
        builder = Builder(
            settings=settings,
            runtime=runtime,
            metrics=metrics,
            name=name,
            died=died,
            stop=asyncio.Event(),
        )
        service = await builder.build()
        if runtime is not None and settings.mode is Mode.ENCODE:
            await Server(runtime, address, service.handle).start()
        return cls(service, settings, metrics, runtime, died)

    async def answer(self, question: Question) -> Answer:
        if isinstance(question, Ask):
            return Replied(question.number, await self._reply(question.request))
        assert isinstance(question, AskUsage)
        return Used(question.number, self._usage())

    async def _reply(self, request: wire.EmbedRequest) -> wire.EmbedReply | wire.Failure:
        try:
            reply = await self._service.handle(request)
        except TesseraError as error:
            return wire.Failure.of(error)
        assert isinstance(reply, wire.EmbedReply), "an embed worker is asked alone"
        return reply

    def _usage(self) -> Usage:
        value = self._metrics.registry.get_sample_value
        hits = value("tessera_embedding_cache_hits_total") or 0
        seconds = (value(f"tessera_{stage}_seconds_sum") or 0.0 for stage in ("embed", "encode"))
        return Usage(
            engine_seconds=sum(seconds),
            images=int(hits + (value("tessera_embedding_cache_misses_total") or 0)),
            cached_images=int(hits),
        )

    async def close(self) -> None:
        self._watching.cancel()
        await self._service.close()
        if self._runtime is not None:
            self._runtime.shutdown()


def main() -> int:
    belong_to_parent()
    descriptor, *log = sys.argv[1:]
    log_as("engine", early := log_settings(log))
    set_environment_defaults(json_log=early.format is LogFormat.JSON)
    return uvloop.run(answer_parent(int(descriptor), Worker.start))


if __name__ == "__main__":
    leave(main())
