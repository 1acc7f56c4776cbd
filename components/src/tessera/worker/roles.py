"""Building a worker of each role from its configuration."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from tessera import wire
from tessera.cache import EmbeddingCache
from tessera.engine.base import vision_of
from tessera.engine.factory import make_text_engine, make_vision_engine, rounding
from tessera.engine.no_text import NoText
from tessera.engine.placement import Placement, place
from tessera.engine.quantization import said
from tessera.engine.settings import EngineSettings
from tessera.engine.streams import reserve_pinned
from tessera.errors import ConfigError, EngineDead
from tessera.imaging import needs_threads
from tessera.models import Model, open_model
from tessera.models.base import VisionSpec
from tessera.resampling import compiled
from tessera.rpc import Client, Runtime
from tessera.transport.host import host_id
from tessera.transport.inbox import Inbox
from tessera.transport.outbox import Outbox
from tessera.transport.slab.geometry import Geometry
from tessera.worker import sizes
from tessera.worker.decoding import Decoder, Limits, ProcessDecoder, ThreadDecoder
from tessera.worker.embed import EmbedService
from tessera.worker.encode import EncodeService
from tessera.worker.image_rows import ImageRows, VisionSource
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.remote_vision import RemoteVision
from tessera.worker.settings import Mode, WorkerSettings
from tessera.worker.vision_stage import LocalVision, VisionStage

log = logging.getLogger(__name__)

T = TypeVar("T")


class Service(Protocol):
    """What a role answers with.

    ``drain`` waits for what peers still hold; ``running_seconds`` is how long an engine has been busy with
    one batch, 0 when none is.
    """

    def handle(self, request: wire.Request) -> Awaitable[wire.Reply]: ...

    async def drain(self, timeout: float) -> None: ...

    async def close(self) -> None: ...

    def running_seconds(self) -> float: ...


COMPONENT = {Mode.AGG: "embed", Mode.EMBED: "embed", Mode.ENCODE: "encode"}
"""The Dynamo component each role serves: a frontend calls aggregated and embed workers alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Loads what a role needs, warms it up, and wires it together.

    ``name`` is the instance's own in discovery, by which peers know it as a producer or reader of rows.
    ``runtime`` is needed by an embed worker alone, which asks others for rows.
    ``died`` is told when an engine can run nothing any more; ``stop`` is set when the worker is to drain.
    """

    settings: WorkerSettings
    runtime: Runtime | None
    metrics: WorkerMetrics
    name: str
    died: Callable[[EngineDead], None]
    stop: asyncio.Event

    async def build(self) -> Service:
        settings = self.settings
        model = await _timed(
            "opened the checkpoint", lambda: open_model(settings.model_path, settings.model_options)
        )
        await _timed("fingerprinted it", lambda: model.fingerprint)
        if settings.extra_engine_args is not None:
            log.info("engine settings: %s", settings.extra_engine_args)
        if model.vision is None:
            if settings.mode is Mode.ENCODE:
                raise ConfigError(
                    f"{settings.model_path} ({model.family}) reads text alone and needs no encode worker"
                )
            log.info("%s reads text alone: no vision stage, no cache of vision rows", model.family)
        share = sizes.share_of(settings)
        settings = sizes.sized(sizes.precise(self.settings, model), model, sizes.Room(share=share))
        log.info("%s", sizes.said(settings, self.settings, model, share))
        for stage, engine in sizes.running(settings, model).items():
            placement = place(engine)
            log.info("precision: %s", said(model, stage, engine, placement))
            self.metrics.set_precision(stage, placement.dtype, rounding(engine))
        log.info("memory:\n%s", sizes.account_of(settings, model).check())
        sized = replace(self, settings=settings)
        if settings.mode is Mode.ENCODE:
            return await sized._encode(model, vision_of(model))
        return await sized._embed(model)

    async def _encode(self, model: Model, vision: VisionSpec) -> EncodeService:
        settings = self.settings.stages.vision
        placement = place(settings)
        await self._reserve_cache(model, placement)
        stage = await self._vision_stage(model, vision, settings, placement)
        transport = self.settings.stages.transport
        geometry = Geometry(
            capacity_rows=sizes.slab_rows(transport, vision, placement),
            block_rows=sizes.BLOCK_ROWS,
            row_width=vision.row_width,
            dtype=placement.dtype,
        )
        outbox = Outbox(self.name, geometry, transport, device=placement.device)
        self.metrics.watch_slab(outbox.slab.stats)
        self.metrics.watch_registrations(lambda: outbox.nixl_registrations)
        info = self._info(model, placement, outbox.infos())
        vectors = None
        if vision.gives_output:
            source = LocalVision(stage, vision, placement, rounding(settings))
            images = self._images(model, vision, source, info)
            # An image is a token, and a unit.
            vectors = EmbedService(model, NoText(), settings, images, self.metrics, info)
        return EncodeService(stage, outbox, self.metrics, info, vectors=vectors)

    def _images(
        self, model: Model, vision: VisionSpec, source: VisionSource | None, info: wire.WorkerInfo
    ) -> ImageRows:
        cache = EmbeddingCache(self.settings.cache_bytes or 0)
        return ImageRows(model, vision, cache, source, info.dtype, self.metrics)

    async def _reserve_cache(self, model: Model, placement: Placement) -> None:
        if placement.is_cuda and model.vision is not None and self.settings.cache_bytes:
            nbytes = self.settings.cache_bytes
            await _timed("page-locked the cache of vision rows", lambda: reserve_pinned(nbytes))

    async def _embed(self, model: Model) -> EmbedService:
        settings = self.settings.stages.text
        placement = place(settings)
        await self._reserve_cache(model, placement)
        engine = await _timed("loaded the text engine", lambda: make_text_engine(model, settings, placement))
        await _timed("warmed the text engine", engine.warm)
        info, images = self._info(model, placement), None
        if (vision := model.vision) is not None:
            source = await self._vision_source(model, vision, placement, info)
            images = self._images(model, vision, source, info)
        return EmbedService(model, engine, settings, images, self.metrics, info, died=self.died)

    async def _vision_source(
        self, model: Model, vision: VisionSpec, placement: Placement, own: wire.WorkerInfo
    ) -> VisionSource | None:
        if self.settings.mode is Mode.AGG:
            settings = self.settings.stages.vision
            vision_placement = place(settings)
            stage = await self._vision_stage(model, vision, settings, vision_placement)
            return LocalVision(stage, vision, vision_placement, rounding(settings))
        if not self.settings.images:
            return None

        def check(info: wire.WorkerInfo) -> str | None:
            theirs, ours = (info.fingerprint, info.dtype), (own.fingerprint, own.dtype)
            return None if theirs == ours else f"it serves {theirs}, this worker {ours}"

        if self.runtime is None:
            raise ConfigError("an embed worker asks others for vision rows, and there is no way to them here")
        reading = sizes.reading(self.settings.stages.transport, vision, placement)
        inbox = Inbox(self.name, reading)
        self.metrics.watch_registrations(lambda: inbox.nixl_registrations)
        self.metrics.watch_peers(lambda: inbox.peers)
        return RemoteVision(
            await Client.connect(self.runtime, self.settings.encode_endpoint),
            check,
            inbox,
            self.metrics,
            device=torch.device(placement.device),
            wait_seconds=self.settings.encode_wait_seconds,
            stop=self.stop,
        )

    async def _vision_stage(
        self, model: Model, vision: VisionSpec, settings: EngineSettings, placement: Placement
    ) -> VisionStage:
        engine = await _timed(
            "loaded the vision engine", lambda: make_vision_engine(model, settings, placement)
        )
        await _timed("warmed the vision engine", engine.warm)
        decoder = await _timed("started the image decoders", lambda: self._decoder(model, vision))
        return VisionStage(
            model,
            vision,
            engine,
            settings,
            placement,
            self.metrics,
            decoder=decoder,
            threads=self.settings.stages.preprocess_threads,
            died=self.died,
        )

    def _decoder(self, model: Model, vision: VisionSpec) -> Decoder:
        stages = self.settings.stages
        # Decoders look for themselves, and log nothing.
        compiled()
        if stages.preprocess == "threads":
            return ThreadDecoder(model, max_pixels=self.settings.max_image_pixels)
        limits = Limits(
            seconds=stages.preprocess_seconds,
            memory_bytes=stages.preprocess_mb << 20,
            max_pixels=self.settings.max_image_pixels,
            threads=needs_threads(),
        )
        return ProcessDecoder(
            self.settings.model_path,
            self.settings.model_options,
            vision,
            limits,
            count=stages.preprocess_threads,
            lost=lambda why: self.metrics.decoder_losses.labels(why).inc(),
        )

    def _info(
        self, model: Model, placement: Placement, slabs: tuple[wire.SlabInfo, ...] = ()
    ) -> wire.WorkerInfo:
        vision = model.vision
        return wire.WorkerInfo(
            role=self.settings.mode.value,
            model=self.settings.served_model_names[0],
            fingerprint=model.fingerprint,
            dtype=placement.dtype,
            rounding=self._rounding(model),
            width=model.output.width,
            row_width=0 if vision is None else vision.row_width,
            images=vision is not None and (self.settings.mode is not Mode.EMBED or self.settings.images),
            host=host_id(),
            slabs=slabs,
        )

    def _rounding(self, model: Model) -> str:
        """What a lone stage, or vision and text, round beyond the dtype that is told, which is the text's."""
        running = sizes.running(self.settings, model)
        of = {stage: rounding(engine) for stage, engine in running.items()}
        if len(of) == 1:
            return of.popitem()[1]
        if (own := place(running["vision"]).dtype) != place(running["text"]).dtype:
            of["vision"] = f"{own} {of['vision']}".rstrip()
        return f"{of['vision']}; {of['text']}" if any(of.values()) else ""


async def _timed(what: str, make: Callable[[], T]) -> T:
    # Off the event loop, which has a signal to answer and a lease to keep meanwhile.
    started = time.perf_counter()
    made = await asyncio.to_thread(make)
    log.info("%s in %.1f s", what, time.perf_counter() - started)
    return made
