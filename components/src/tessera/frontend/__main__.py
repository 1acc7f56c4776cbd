"""``python -m tessera.frontend``: serve HTTP until SIGTERM, then finish what is in flight."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import uuid
from collections.abc import Callable, Sequence

import uvloop

from tessera import tracing, wire
from tessera.errors import DiscoveryLost, TesseraError
from tessera.frontend.api.endpoint import Endpoint
from tessera.frontend.api.status import StatusBoard, origin
from tessera.frontend.app import make_app
from tessera.frontend.http.admission import Admission, Capacity, RateLimiter
from tessera.frontend.http.auth import API_KEYS_VARIABLE, Authenticator
from tessera.frontend.http.server import HttpServer
from tessera.frontend.media import MediaLoader
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.page import Page
from tessera.frontend.serving.dispatch import Dispatcher, Embedder
from tessera.frontend.serving.lent_rows import RowLender
from tessera.frontend.serving.pipeline import Pipeline
from tessera.frontend.serving.result_cache import ResultCache, ResultSalt
from tessera.frontend.serving.router import Router
from tessera.frontend.settings import FrontendSettings, parse
from tessera.logs import LogFormat, log_as, log_settings
from tessera.models import Model, open_model
from tessera.process_exit import leave, when_told
from tessera.rpc import (
    DRAIN_PATIENCE_SECONDS,
    FORGOTTEN,
    Check,
    Client,
    Peers,
    Runtime,
    set_environment_defaults,
    until_back,
)

# Of clients' own vision rows, lent to workers at a time; beyond it they go into the messages.
_LENT_BYTES = 512 << 20

log = logging.getLogger("tessera.frontend")

# Tokens, and tiles, that may be in flight before the first worker has said how much it takes.
_UNKNOWN_CAPACITY = 65_536


async def serve(settings: FrontendSettings) -> None:
    """Run one frontend until SIGTERM or SIGINT; raises ``DiscoveryLost`` when it cannot hear of workers."""
    tracing.start("frontend", settings.traces)
    model = open_model(settings.model_path)
    metrics = FrontendMetrics()
    metrics.describe(settings.served_model_name)
    runtime = Runtime(settings.rpc)
    name = f"frontend-{uuid.uuid4().hex}"
    embed = await Client.connect(runtime, settings.embed_endpoint)
    encode = await Client.connect(runtime, settings.encode_endpoint)
    peers = Peers(embed, _same_model(model), caller=name)
    # Watched for health alone: the embed workers call them.
    encode_peers = Peers(encode, _same_model(model), caller=name)
    media = MediaLoader(settings.media, settings.limits.images)
    metrics.watch_workers("embed", lambda: len(peers.ready))
    metrics.watch_workers("encode", lambda: len(encode_peers.ready))
    lender = RowLender(name, capacity=_LENT_BYTES)
    metrics.watch_lent_rows(lambda: lender.lent)
    expected = {"embed": settings.expected_embed, "encode": settings.expected_encode}
    for component, count in expected.items():
        metrics.workers_expected.labels(component).set(count)
    dispatcher = Dispatcher(
        peers, Router(), metrics, model.hidden, lender=lender, wait_seconds=settings.worker_wait_seconds
    )
    capacity = Capacity(
        lambda: sum(info.tokens for info in peers.ready.values()),
        # Aggregated workers encode for themselves.
        lambda: sum(info.tiles for info in (*peers.ready.values(), *encode_peers.ready.values())),
        unknown=_UNKNOWN_CAPACITY,
    )
    admission = Admission(capacity, max_requests=settings.limits.max_in_flight)
    metrics.watch_admission(lambda: admission.requests, lambda: admission.tokens, lambda: admission.tiles)
    embedder = _embedder(settings, model, dispatcher, peers, encode_peers, metrics)
    pipeline = Pipeline(model, media, embedder, settings.limits, metrics)
    keys = Authenticator(settings.access.keys)
    limiter = RateLimiter(
        keys.names,
        requests_per_minute=settings.access.requests_per_minute,
        tokens_per_minute=settings.access.tokens_per_minute,
    )
    draining = asyncio.Event()
    app = make_app(
        Endpoint(pipeline, settings.served_model_name, settings.limits, limiter, metrics),
        metrics,
        peers,
        encode_peers,
        keys=keys,
        limiter=limiter,
        admission=admission,
        expected=expected,
        model=settings.served_model_name,
        max_tokens=pipeline.max_tokens,
        draining=draining,
        board=StatusBoard(_head(settings, model), peers, encode_peers, metrics),
        try_page=Page() if settings.page else None,
        open_metrics=settings.access.open_metrics,
    )
    server = HttpServer(
        app,
        host=settings.host,
        port=settings.port,
        drain_seconds=settings.drain_seconds,
        limits=settings.limits.connection,
    )

    def stop() -> None:
        if not draining.is_set():
            peers.hurry(DRAIN_PATIENCE_SECONDS)
        draining.set()
        server.should_exit = True

    when_told(stop)
    lost = asyncio.create_task(_leave_when_lost(runtime, (peers, encode_peers), stop))
    # What exists by now stays. The collector walked through all of it every few thousand requests, and each
    # that was in flight waited 40 ms for that.
    gc.collect()
    gc.freeze()
    await server.serve()
    await media.close()
    await peers.close()
    await encode_peers.close()
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    runtime.shutdown()
    if not lost.cancelled():
        raise lost.result()


async def _leave_when_lost(
    runtime: Runtime, peers: Sequence[Peers], stop: Callable[[], None]
) -> DiscoveryLost:
    """Stop when no worker can be heard of any more, but not before discovery answers: until then say 503."""
    error = await runtime.lost()
    log.critical("leaving as soon as discovery answers: %s", error)
    for listed in peers:
        listed.expect_none()
    await until_back(runtime.config.discovery_backend)
    stop()
    return error


def _embedder(
    settings: FrontendSettings,
    model: Model,
    dispatcher: Dispatcher,
    peers: Peers,
    encode_peers: Peers,
    metrics: FrontendMetrics,
) -> Embedder:
    if not settings.result_cache_bytes:
        return dispatcher
    return ResultCache(
        dispatcher,
        metrics,
        capacity=settings.result_cache_bytes,
        hidden=model.hidden,
        tokens_per_tile=model.tokens_per_tile,
        salt=ResultSalt(model.fingerprint, lambda: peers.ready.values(), lambda: encode_peers.ready.values()),
        flight_seconds=settings.limits.timeout_seconds,
        workers=lambda: len(peers.ready),
    )


def _head(settings: FrontendSettings, model: Model) -> dict[str, str | None]:
    """What does not change in ``/status``."""
    return {
        "model": settings.served_model_name,
        "fingerprint": model.fingerprint,
        "checkpoint": origin(settings.model_path),
    }


def _same_model(model: Model) -> Check:
    def check(info: wire.WorkerInfo) -> str | None:
        if info.fingerprint == model.fingerprint:
            return None
        return f"it serves {info.model!r} ({info.fingerprint}), this frontend {model.fingerprint}"

    return check


def main() -> int:
    # Before the rest, whose errors are logged, too.
    log_as("frontend", settings := log_settings())
    set_environment_defaults(json_log=settings.format is LogFormat.JSON)
    try:
        uvloop.run(serve(parse(api_keys=os.environ.pop(API_KEYS_VARIABLE, None))))
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
