"""The parts that one frontend is made of, and what the API of a client adds to it."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.types import Scope

from tessera import wire
from tessera.cache import SharedCache, file_bytes
from tessera.errors import ConfigError, TesseraError
from tessera.frontend.admission.rate import RateLimiter
from tessera.frontend.admission.room import Admission, Capacity
from tessera.frontend.api.endpoint import Endpoint, LoopTurns
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.group import LENT_BYTES, MOST_KEYS, PULSE_SECONDS, FrontendGroup, Seat
from tessera.frontend.http.auth import ANONYMOUS, Authenticator
from tessera.frontend.http.connection import Answer
from tessera.frontend.http.errors import ErrorShape, openai_error
from tessera.frontend.media import MediaLoader
from tessera.frontend.metrics import FrontendMetrics, ModelMetrics
from tessera.frontend.model_settings import ModelSettings, read_models
from tessera.frontend.serving.dispatch import Dispatcher, Embedder, Router, Salt
from tessera.frontend.serving.images import KnownMedia
from tessera.frontend.serving.long_texts import LongTexts
from tessera.frontend.serving.models import Models
from tessera.frontend.serving.pipeline import Pipeline
from tessera.frontend.serving.result_cache import Entries, KeyPrefix, ResultCache, SharedEntries
from tessera.frontend.serving.served import Served, ServedModel, Workers
from tessera.frontend.serving.towers import TowersDispatcher
from tessera.frontend.settings import FrontendSettings
from tessera.frontend.widths import Widths
from tessera.models import Model, open_model, try_out
from tessera.models.base import OutputKind, Outputs, chunks_of, outputs_of, unlisted_of
from tessera.models.declared import assumed, declared_of, pooling_modes
from tessera.rpc import Check, Client, Peers, Runtime
from tessera.tasks import KEEPER
from tessera.transport.lending import Lender
from tessera.turns import Threads

log = logging.getLogger(__name__)

# Of memory lent to workers at a time, for clients' own vision rows and for long replies; beyond it they go
# into the messages.
_LENT_BYTES: Final = 512 << 20

# Of clients' names for images, for each frontend of a group: 40,000 of them.
_NAMES_BYTES: Final = 4 << 20
_NAME_BYTES: Final = 88
# Of the smallest vectors that fill the result cache; its index takes 1 % of it.
_RESULT_BYTES: Final = 1024

# As many as an event loop has by default.
_THREADS: Final = min(32, (os.cpu_count() or 1) + 4)

TASKS: Final = {
    OutputKind.VECTOR: "embed",
    OutputKind.TOKENS: "token_embed",
    OutputKind.SCORE: "classify",
    OutputKind.SPARSE: "sparse_embed",
}
"""Names for what a model does, by its output; vLLM's where it has one."""

# Tokens, and units, that may be in flight before the first worker has said how much it takes.
_UNKNOWN_CAPACITY: Final = 65_536


class Service:
    """What the routes and the middleware answer with; owned by one event loop. ``close`` ends it.

    ``keys`` is None where the service is open to all, ``limiter`` where no key has a rate. ``threads`` do
    what would keep the loop for milliseconds: they read large images and calls, and write large answers.
    ``tasks`` go on for as long as the service does, ``draining`` is set when the process has been told to
    stop. The application sets ``routes``, those that answer what comes out of a model of a kind, and
    ``refuse_at_once``, which answers by its head what no layer around the application has to see.
    """

    def __init__(self, settings: FrontendSettings) -> None:
        access, limits, seat = settings.access, settings.limits, settings.seat
        self.settings = settings
        self.runtime = Runtime(settings.rpc)
        name = f"frontend-{uuid.uuid4().hex}"
        # Workers divide what they take among those who ask: the frontends of one host are one.
        self._caller = f"frontends-{seat.name}" if seat else name
        self.group = group = FrontendGroup(seat)
        self.turns = LoopTurns()
        self.threads = Threads(_THREADS, "aside")
        # One: several large bodies parsed at a time would take as many times the memory.
        self.bodies = Threads(1, "body")
        self.media = MediaLoader(settings.media, limits.images, threads=self.threads)
        names = None if seat is None else _shared(seat, 0, seat.size * _NAMES_BYTES, _NAME_BYTES)
        self._known = KnownMedia(shared=names)
        self.metrics = FrontendMetrics(seat)
        self._lender = lender = Lender(name, capacity=_LENT_BYTES)
        self._key_names = [key.name for key in access.keys] or [ANONYMOUS]
        if len(self._key_names) > MOST_KEYS:
            raise ConfigError(f"{len(self._key_names)} API keys are more than {MOST_KEYS}")
        self.keys = Authenticator(access.keys) if access.keys else None
        self.limiter: RateLimiter | None = None
        if access.requests_per_minute or access.tokens_per_minute:
            self.limiter = RateLimiter(
                self._key_names,
                requests_per_minute=access.requests_per_minute,
                tokens_per_minute=access.tokens_per_minute,
                group=group,
            )
        self.admission = admission = Admission(
            max_requests=limits.max_in_flight,
            max_response_bytes=limits.max_response_bytes,
            body_bytes=limits.bodies_bytes,
            group=group,
        )
        self.metrics.watch(admission, lambda: lender.lent + group.elsewhere(LENT_BYTES))
        self.models = Models(
            self._open, lambda model: admission.close_room(model.room), patience=limits.timeout_seconds
        )
        self.endpoint = Endpoint(self.models, limits, self.turns, self.threads, self.bodies)
        # By slot. Of each there is one: a model may still be answering when the next one has its slot.
        self._entries: dict[int, SharedEntries] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.draining = asyncio.Event()
        self.routes: dict[OutputKind, list[str]] = {}
        self.refuse_at_once: Callable[[Scope], Answer | None] = lambda scope: None

    @classmethod
    async def connect(cls, settings: FrontendSettings) -> Service:
        """Open the models and follow discovery; waits for no worker."""
        service = cls(settings)
        for model in settings.models:
            # Of all, before those of the first are asked anything.
            for address in (model.embed_endpoint, model.encode_endpoint):
                service.runtime.endpoint(address)
        await service.models.start(settings.models)
        if service.group.siblings:
            service.tasks.add(KEEPER.start("group", service._pulse, every=PULSE_SECONDS))
        return service

    async def _pulse(self) -> None:
        """Show the other frontends of the group that this one is there."""
        workers = {model.settings.name: model.workers.count for model in self.models}
        self.group.pulse(workers, lent_bytes=self._lender.lent)

    async def follow(self) -> bool:
        """Serve what the file of models lists now; what cannot be read changes nothing.

        False when trying the same again may do more.
        """
        settings = self.settings
        if settings.models_file is None:
            return True
        try:
            wanted = await asyncio.to_thread(read_models, settings.models_file, settings.rpc.namespace)
        except TesseraError as error:
            log.error("the models stay as they are: %s", error)
            return True
        return await self.models.follow(wanted)

    def not_ready(self) -> str:
        """Return why balancers should look elsewhere; nothing for a frontend that is ready.

        With ``health_needs`` all, every model that is to be served must have a worker.
        """
        if KEEPER.trouble is not None:
            return f"not ready: {KEEPER.trouble}"
        ready = [model for model in self.models if model.workers.embed.ready]
        if self.draining.is_set() or not ready:
            return "not ready"
        names = {model.settings.name for model in ready}
        wanted = [*(model.settings.name for model in self.models), *self.models.waiting]
        missing = [name for name in wanted if name not in names]
        if missing and self.settings.health_needs == "all":
            return f"not ready: {', '.join(missing)}"
        return ""

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.media.close()
        await self.models.close()
        self.threads.close()
        self.bodies.close()

    async def _open(self, given: ModelSettings) -> ServedModel:
        """Open a checkpoint and follow its workers; waits for none. Raises ``TesseraError``."""
        # Its own name in the table, and that of each key for it.
        keys = len(self._key_names)
        if self.group.free_names < keys + 1:
            raise ConfigError(f"with {keys} API keys there is no room for another model")
        model = await asyncio.to_thread(open_model, given.directory, given.model_options)
        # Of a service's frontends one: it takes a tenth of a second.
        if (seat := self.settings.seat) is None or seat.index == 0:
            await asyncio.to_thread(try_out, model)
        if given.max_embed_tokens and chunks_of(model) is None:
            raise ConfigError(
                f"--max-embed-tokens {given.max_embed_tokens}: a vector of {given.name!r} is not the mean of "
                "its tokens' states, and so no mean of the vectors of runs"
            )
        widths = Widths.offered(model.dimensions, model.output.width, given.dimensions_allowed)
        embed, encode = [
            Peers(await Client.connect(self.runtime, address), _same_model(model), caller=self._caller)
            for address in (given.embed_endpoint, given.encode_endpoint)
        ]
        workers = Workers(embed=embed, encode=encode)
        metrics = self.metrics.of(given.name)
        try:
            return self._served(given, model, workers, metrics, widths)
        except Exception:
            metrics.forget()
            await workers.close()
            raise

    def _served(
        self, given: ModelSettings, model: Model, workers: Workers, metrics: ModelMetrics, widths: Widths
    ) -> ServedModel:
        settings = self.settings
        room = self.admission.open_room(
            given.name,
            Capacity.of_workers(workers.embed, workers.encode, unknown=_UNKNOWN_CAPACITY),
            pairs=model.output.kind is OutputKind.SCORE,
        )
        metrics.watch_room(room)
        embedder = self._embedder(given, model, workers, metrics)
        served = ServedModel(
            settings=given,
            model=model,
            served=Served(
                names=given.served_model_names,
                output=model.output,
                outputs=outputs_of(model),
                unlisted=unlisted_of(model),
                limits=settings.limits.request,
                token_text=model.token_text,
            ),
            workers=workers,
            pipeline=Pipeline(
                model,
                self.media,
                embedder,
                settings.limits,
                metrics,
                self._known,
                widths=widths,
                salt=Salt(by_key=settings.cache_by_key),
                long_texts=LongTexts(
                    given.directory,
                    given.model_options,
                    max_tokens=max(model.max_tokens, given.max_embed_tokens),
                    seconds=settings.limits.timeout_seconds,
                ),
                max_embed_tokens=given.max_embed_tokens,
            ),
            room=room,
            metrics=metrics,
        )
        for component, peers in workers.by_component.items():
            metrics.watch_workers(component, peers, expected=partial(served.expects, component))
        return served

    def _embedder(
        self, given: ModelSettings, model: Model, workers: Workers, metrics: ModelMetrics
    ) -> Embedder:
        settings = self.settings
        outputs = Outputs.of_model(model)

        def dispatching(peers: Peers) -> Dispatcher:
            return Dispatcher(
                peers,
                Router(),
                metrics,
                outputs,
                lender=self._lender,
                wait_seconds=settings.worker_wait_seconds,
            )

        dispatcher: Embedder = dispatching(workers.embed)
        if model.vision is not None and model.vision.gives_output:
            dispatcher = TowersDispatcher(
                dispatching(workers.embed), dispatching(workers.encode), workers.encode, model.output
            )
        if not settings.result_cache_bytes:
            metrics.watch_result_cache(lambda: 0)
            return dispatcher
        return ResultCache(
            dispatcher,
            metrics,
            capacity=settings.result_cache_bytes,
            outputs=outputs,
            key_prefix=KeyPrefix(
                model.fingerprint, lambda: workers.embed.ready.values(), lambda: workers.encode.ready.values()
            ),
            flight_seconds=settings.limits.timeout_seconds,
            workers=lambda: len(workers.embed.ready),
            entries=self._kept(given.slot),
            salt=Salt(by_key=settings.cache_by_key),
        )

    def _kept(self, slot: int) -> Entries | None:
        """Where all frontends of the group keep results of the slot's model; None: this one alone does."""
        if (seat := self.settings.seat) is None:
            return None
        if slot not in self._entries:
            capacity = self.settings.result_cache_bytes
            names = file_bytes(size=seat.size, capacity=seat.size * _NAMES_BYTES, entry_bytes=_NAME_BYTES)
            each = file_bytes(size=seat.size, capacity=capacity, entry_bytes=_RESULT_BYTES)
            shared = _shared(seat, names + slot * each, capacity, _RESULT_BYTES)
            self._entries[slot] = SharedEntries(shared)
        return self._entries[slot]


def described(service: Service, served: ServedModel) -> dict[str, Any]:
    """What clients and people are told of a model beside its name."""
    model, source = served.model, served.settings.origin
    return {
        "family": model.family,
        "output": {
            "kind": model.output.kind.value,
            "width": model.output.width,
            "dimensions": [list(each) for each in served.pipeline.widths.ranges],
        },
        "outputs": [
            {"name": output.name, "kind": output.kind.value, "width": output.width, "most": output.most}
            for output in served.served.outputs
        ],
        "late_chunking": chunks_of(model) is not None,
        "images": model.vision is not None,
        "precision": _precision(served),
        "task": TASKS.get(model.output.kind),
        "pooling": pooling_modes(model),
        "pooling_assumed": "pooling" in assumed(model),
        "assumed": assumed(model),
        "prompts": dict(declared_of(model).prompts),
        "routes": service.routes.get(model.output.kind, []),
        "source": None if source is None else source.described(),
    }


def _precision(served: ServedModel) -> list[dict[str, str]]:
    """What its workers compute in: one entry for each kind of them, as they come and go."""
    ready = (info for peers in (served.workers.embed, served.workers.encode) for info in peers.ready.values())
    kinds = sorted({(info.role, info.dtype, info.rounding) for info in ready})
    return [{"role": role, "dtype": dtype, "rounding": rounding} for role, dtype, rounding in kinds]


@dataclass(frozen=True, slots=True)
class ClientApi:
    """The API of one client: its name in ``/docs``, its routes, and the shape of the errors of these."""

    name: str
    routes: Callable[[Service], Sequence[ApiRoute]]
    error: ErrorShape = openai_error
    waits_below: tuple[str, ...] = ()
    """What paths begin with whose routes wait for room themselves; whatever is there has its errors."""
    open_paths: frozenset[str] = frozenset()
    """Paths that are answered without an API key."""
    place: int = 100
    """Where ``/docs`` lists it among those found by entry points; equal ones go by the names of these."""


def _same_model(model: Model) -> Check:
    def check(info: wire.WorkerInfo) -> str | None:
        if info.fingerprint == model.fingerprint:
            return None
        return f"it serves {info.model!r} ({info.fingerprint}), this frontend {model.fingerprint}"

    return check


def _shared(seat: Seat, offset: int, capacity: int, entry_bytes: int) -> SharedCache:
    return SharedCache(
        seat.cache,
        offset=offset,
        index=seat.index,
        size=seat.size,
        capacity=capacity,
        entry_bytes=entry_bytes,
    )
