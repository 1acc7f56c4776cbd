"""The parts that one frontend is made of, and what the API of a client adds to it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import APIRouter

from tessera import wire
from tessera.cache import SharedCache
from tessera.errors import ConfigError
from tessera.frontend.api.endpoint import Endpoint
from tessera.frontend.group import LENT_BYTES, MOST_NAMES, PULSE_SECONDS, FrontendGroup
from tessera.frontend.http.admission import Admission, Capacity, RateLimiter
from tessera.frontend.http.auth import Authenticator
from tessera.frontend.http.errors import ErrorShape, openai_error
from tessera.frontend.media import MediaLoader
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.serving.dispatch import Dispatcher, Embedder, RowLender
from tessera.frontend.serving.pipeline import Pipeline
from tessera.frontend.serving.prompts import KnownMedia
from tessera.frontend.serving.result_cache import Entries, KeyPrefix, ResultCache, SharedEntries
from tessera.frontend.serving.router import Router
from tessera.frontend.settings import FrontendSettings
from tessera.frontend.widths import Widths
from tessera.models import Model, open_model
from tessera.models.base import OutputKind
from tessera.rpc import Check, Client, Peers, Runtime

# Of clients' own vision rows, lent to workers at a time; beyond it they go into the messages.
_LENT_BYTES: Final = 512 << 20

# Of clients' names for images, for each frontend of a group: 40,000 of them.
_NAMES_BYTES: Final = 4 << 20
_NAME_BYTES: Final = 88
# Of the smallest vectors that fill the result cache; its index takes 1 % of it.
_RESULT_BYTES: Final = 1024

TASKS: Final = {
    OutputKind.VECTOR: "embed",
    OutputKind.TOKENS: "token_embed",
    OutputKind.SCORE: "classify",
}
"""vLLM's names for what a model does, by its output."""

# Tokens, and units, that may be in flight before the first worker has said how much it takes.
_UNKNOWN_CAPACITY: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers that can serve now, and the numbers that were started, by component.

    The encode workers are watched for health and capacity alone: the embed workers call them.
    """

    embed: Peers
    encode: Peers
    expected: Mapping[str, int]

    @property
    def by_component(self) -> dict[str, Peers]:
        return {"embed": self.embed, "encode": self.encode}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes and the middleware answer with; owned by one event loop. ``close`` ends it.

    ``draining`` is set when the process has been told to stop.
    """

    settings: FrontendSettings
    runtime: Runtime
    model: Model
    workers: Workers
    media: MediaLoader
    endpoint: Endpoint
    keys: Authenticator
    limiter: RateLimiter
    admission: Admission
    metrics: FrontendMetrics
    group: FrontendGroup
    pulse: asyncio.Task[None]
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    routes: list[str] = field(default_factory=list)
    """Those that answer what comes out of the model; the application fills it once it has them all."""

    @classmethod
    async def connect(cls, settings: FrontendSettings) -> Service:
        """Open the model and follow discovery; waits for no worker."""
        model = open_model(settings.model_path, settings.model_options)
        widths = Widths.offered(model.dimensions, model.output.width, settings.dimensions_allowed)
        runtime = Runtime(settings.rpc)
        name = f"frontend-{uuid.uuid4().hex}"
        group = FrontendGroup(settings.seat)
        # Workers divide what they take among those who ask: the frontends of one host are one.
        caller = f"frontends-{settings.seat.name}" if settings.seat else name
        workers = await _workers(settings, runtime, model, caller)
        media = MediaLoader(settings.media, settings.limits.images)
        metrics = FrontendMetrics(settings.seat)
        lender = RowLender(name, capacity=_LENT_BYTES)
        metrics.watch_lent_rows(lambda: lender.lent + group.elsewhere(LENT_BYTES))
        known, entries = _kept(settings)
        embedder = _embedder(settings, model, workers, metrics, lender, entries)
        keys = Authenticator(settings.access.keys)
        if len(keys.names) > MOST_NAMES:
            raise ConfigError(f"{len(keys.names)} API keys are more than {MOST_NAMES}")
        limiter = RateLimiter(
            keys.names,
            requests_per_minute=settings.access.requests_per_minute,
            tokens_per_minute=settings.access.tokens_per_minute,
            group=group,
        )
        capacity = Capacity.of_workers(workers.embed, workers.encode, unknown=_UNKNOWN_CAPACITY)
        admission = Admission(
            capacity,
            max_requests=settings.limits.max_in_flight,
            max_response_bytes=settings.limits.max_response_bytes,
            pairs=model.output.kind is OutputKind.SCORE,
            group=group,
        )
        metrics.set_info(settings.served_model_names[0])
        for component, peers in workers.by_component.items():
            metrics.watch_workers(component, peers, expected=workers.expected[component])
        metrics.watch_admission(admission)
        pipeline = Pipeline(model, media, embedder, settings.limits, metrics, known, widths=widths)
        return cls(
            settings=settings,
            runtime=runtime,
            model=model,
            workers=workers,
            media=media,
            endpoint=Endpoint(pipeline, settings.served_model_names, settings.limits, limiter, metrics),
            keys=keys,
            limiter=limiter,
            admission=admission,
            metrics=metrics,
            group=group,
            pulse=asyncio.create_task(_pulse(group, workers, lender), name="pulse"),
        )

    async def close(self) -> None:
        self.pulse.cancel()
        await self.media.close()
        for peers in self.workers.by_component.values():
            await peers.close()


async def _pulse(group: FrontendGroup, workers: Workers, lender: RowLender) -> None:
    """Tell the other frontends of the group that this one is there, until cancelled."""
    while group.siblings:
        group.pulse(embed=len(workers.embed.ready), encode=len(workers.encode.ready), lent_bytes=lender.lent)
        await asyncio.sleep(PULSE_SECONDS)


def described(service: Service) -> dict[str, Any]:
    """What clients and people are told of the model beside its name."""
    model, source = service.model, service.settings.source
    widths = service.endpoint.pipeline.widths
    return {
        "family": model.family,
        "output": {
            "kind": model.output.kind.value,
            "width": model.output.width,
            "dimensions": [list(each) for each in widths.ranges],
        },
        "images": model.vision is not None,
        "task": TASKS[model.output.kind],
        "routes": service.routes,
        "source": None if source is None else source.described(),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientApi:
    """The API of one client: its routes, and the shape of the errors that they answer with."""

    routes: Callable[[Service], APIRouter]
    error: ErrorShape = openai_error


async def _workers(settings: FrontendSettings, runtime: Runtime, model: Model, name: str) -> Workers:
    embed = await Client.connect(runtime, settings.embed_endpoint)
    encode = await Client.connect(runtime, settings.encode_endpoint)
    return Workers(
        embed=Peers(embed, _same_model(model), caller=name),
        encode=Peers(encode, _same_model(model), caller=name),
        expected={"embed": settings.expected_embed, "encode": settings.expected_encode},
    )


def _same_model(model: Model) -> Check:
    def check(info: wire.WorkerInfo) -> str | None:
        if info.fingerprint == model.fingerprint:
            return None
        return f"it serves {info.model!r} ({info.fingerprint}), this frontend {model.fingerprint}"

    return check


def _kept(settings: FrontendSettings) -> tuple[KnownMedia, Entries | None]:
    """Clients' names for images, and output rows, of all frontends of the group; None: of this one alone."""
    if (seat := settings.seat) is None:
        return KnownMedia(), None

    def shared(offset: int, capacity: int, entry_bytes: int) -> SharedCache:
        return SharedCache(
            seat.cache,
            offset=offset,
            index=seat.index,
            size=seat.size,
            capacity=capacity,
            entry_bytes=entry_bytes,
        )

    names = shared(0, seat.size * _NAMES_BYTES, _NAME_BYTES)
    if not settings.result_cache_bytes:
        return KnownMedia(shared=names), None
    results = shared(names.file_bytes, settings.result_cache_bytes, _RESULT_BYTES)
    return KnownMedia(shared=names), SharedEntries(results)


def _embedder(
    settings: FrontendSettings,
    model: Model,
    workers: Workers,
    metrics: FrontendMetrics,
    lender: RowLender,
    entries: Entries | None,
) -> Embedder:
    dispatcher = Dispatcher(
        workers.embed,
        Router(),
        metrics,
        model.output,
        lender=lender,
        wait_seconds=settings.worker_wait_seconds,
    )
    if not settings.result_cache_bytes:
        metrics.watch_result_cache(lambda: 0)
        return dispatcher
    return ResultCache(
        dispatcher,
        metrics,
        capacity=settings.result_cache_bytes,
        output=model.output,
        key_prefix=KeyPrefix(
            model.fingerprint, lambda: workers.embed.ready.values(), lambda: workers.encode.ready.values()
        ),
        flight_seconds=settings.limits.timeout_seconds,
        workers=lambda: len(workers.embed.ready),
        entries=entries,
    )
