"""Building a worker of each role from its configuration."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import msgspec
import torch

from tessera import wire
from tessera.cache import EmbeddingCache
from tessera.engine.factory import make_text_engine, make_vision_engine, rounding
from tessera.engine.placement import Placement, place
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError, EngineDead
from tessera.models import Model, open_model
from tessera.models.base import VisionSpec
from tessera.rpc import Client, Runtime
from tessera.settings import MIB
from tessera.transport.host import host_id
from tessera.transport.inbox import Inbox, InboxConfig
from tessera.transport.outbox import Outbox, OutboxConfig
from tessera.transport.settings import TransportSettings
from tessera.worker.decoding import Decoder, ProcessDecoder, ThreadDecoder
from tessera.worker.decoding.messages import Limits
from tessera.worker.embed import EmbedService
from tessera.worker.encode import EncodeService
from tessera.worker.image_rows import ImageRows, VisionSource
from tessera.worker.memory import RUNTIME_BYTES, MemoryAccount
from tessera.worker.metrics import WorkerMetrics
from tessera.worker.remote_vision import RemoteVision
from tessera.worker.settings import Mode, WorkerSettings
from tessera.worker.vision_stage import LocalVision, VisionStage

log = logging.getLogger(__name__)

T = TypeVar("T")

# Rows that slots of the slab are multiples of. A page of 1,776 rows loses 1 % to it, a tile of 256 nothing;
# each block has two words that say whose it is.
_BLOCK_ROWS: Final = 64

# What a vision batch and its queue hold of the largest images, where their costs are not given.
_BATCH_IMAGES: Final = 4
_QUEUE_IMAGES: Final = 128


class Service(Protocol):
    """What a role answers with.

    ``drain`` waits for what peers still hold; ``running_seconds`` is how long an engine has been busy with
    one batch, 0 when none is.
    """

    async def handle(self, request: wire.Request) -> wire.Reply: ...

    async def drain(self, timeout: float) -> None: ...

    async def close(self) -> None: ...

    def running_seconds(self) -> float: ...


COMPONENT = {Mode.AGG: "embed", Mode.EMBED: "embed", Mode.ENCODE: "encode"}
"""The Dynamo component each role serves: a frontend calls aggregated and embed workers alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Loads what a role needs, warms it up, and wires it together.

    ``name`` is the instance's own in discovery, by which peers know it as a producer or reader of rows.
    ``died`` is told when an engine can run nothing any more; ``stop`` is set when the worker is to drain.
    """

    settings: WorkerSettings
    runtime: Runtime
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
        log.info("memory:\n%s", self._account(model).check())
        if settings.mode is Mode.ENCODE:
            assert model.vision is not None
            return await self._encode(model, model.vision)
        return await self._embed(model)

    def _account(self, model: Model) -> MemoryAccount:
        """Everything of a size that the configuration decides."""
        settings, vision, account = self.settings, model.vision, MemoryAccount()
        account.add("interpreter and libraries", "cpu", RUNTIME_BYTES)
        if settings.mode is not Mode.EMBED and vision is not None:
            stage = self._vision_settings(vision)
            at = place(stage)
            units = max(stage.max_batch_cost, vision.max_units)
            account.add("vision weights", at.device, model.vision_nbytes(at.dtype))
            batch = model.vision_activation_nbytes(at.dtype, units)
            account.add(f"vision batch of {units} units", at.device, _batches(at, batch))
            if settings.mode is Mode.ENCODE:
                slab = self._slab_rows(vision, at) * vision.row_width * at.torch_dtype.itemsize
                account.add("slab", at.device, slab)
                if at.is_cuda:
                    account.add("pinned copy of the slab", "cpu", slab)
        if settings.mode is not Mode.ENCODE:
            at = place(settings.stages.text)
            tokens = max(settings.stages.text.max_batch_cost, model.max_tokens)
            account.add("text weights", at.device, model.text_nbytes(at.dtype))
            batch = model.text_activation_nbytes(at.dtype, tokens)
            account.add(f"text batch of {tokens} tokens", at.device, _batches(at, batch))
            if vision is not None:
                account.add("cache of vision rows", "cpu", settings.cache_bytes)
        if settings.mode is Mode.EMBED and settings.images and vision is not None:
            account.add("staging for NIXL", "cpu", self._reading(vision, at).staging_mb << 20)
        return account

    def _vision_settings(self, vision: VisionSpec) -> EngineSettings:
        """The vision stage's settings, with its costs by the largest image where they are 0."""
        settings = self.settings.stages.vision
        batch = settings.max_batch_cost or _BATCH_IMAGES * vision.max_units
        queue = settings.max_queue_cost or max(batch, _QUEUE_IMAGES * vision.max_units)
        return msgspec.structs.replace(settings, max_batch_cost=min(batch, queue), max_queue_cost=queue)

    def _slab_rows(self, vision: VisionSpec, placement: Placement) -> int:
        row_bytes = vision.row_width * placement.torch_dtype.itemsize
        # However small it is set, the largest image must fit.
        rows = max((self.settings.stages.transport.slab_mb << 20) // row_bytes, vision.max_rows)
        return -(-rows // _BLOCK_ROWS) * _BLOCK_ROWS

    def _reading(self, vision: VisionSpec, placement: Placement) -> TransportSettings:
        """The hand-off's settings of a reader, whose staging memory holds the largest image at least."""
        settings = self.settings.stages.transport
        nbytes = vision.max_rows * vision.row_width * placement.torch_dtype.itemsize
        return msgspec.structs.replace(settings, staging_mb=max(settings.staging_mb, -(-nbytes // MIB)))

    async def _encode(self, model: Model, vision: VisionSpec) -> EncodeService:
        settings = self._vision_settings(vision)
        placement = place(settings)
        stage = await self._vision_stage(model, vision, settings, placement)
        outbox = Outbox(
            OutboxConfig(
                producer=self.name,
                capacity_rows=self._slab_rows(vision, placement),
                block_rows=_BLOCK_ROWS,
                row_width=vision.row_width,
                dtype=placement.torch_dtype,
                device=placement.device,
                settings=self.settings.stages.transport,
            )
        )
        self.metrics.watch_slab(outbox.stats)
        self.metrics.watch_registrations(lambda: outbox.nixl_registrations)
        return EncodeService(stage, outbox, self.metrics, self._info(model, placement, outbox.infos()))

    async def _embed(self, model: Model) -> EmbedService:
        settings = self.settings.stages.text
        placement = place(settings)
        engine = await _timed("loaded the text engine", lambda: make_text_engine(model, settings, placement))
        await _timed("warmed the text engine", engine.warm)
        info = self._info(model, placement)
        images = None if model.vision is None else await self._images(model, model.vision, placement, info)
        return EmbedService(model, engine, settings, images, self.metrics, info, died=self.died)

    async def _images(
        self, model: Model, vision: VisionSpec, placement: Placement, own: wire.WorkerInfo
    ) -> ImageRows:
        source = await self._vision_source(model, vision, placement, own)
        cache = EmbeddingCache(self.settings.cache_bytes)
        return ImageRows(model, vision, cache, source, own.dtype, self.metrics)

    async def _vision_source(
        self, model: Model, vision: VisionSpec, placement: Placement, own: wire.WorkerInfo
    ) -> VisionSource | None:
        if self.settings.mode is Mode.AGG:
            settings = self._vision_settings(vision)
            vision_placement = place(settings)
            stage = await self._vision_stage(model, vision, settings, vision_placement)
            return LocalVision(stage, vision.row_width, vision_placement, rounding(settings))
        if not self.settings.images:
            return None

        def check(info: wire.WorkerInfo) -> str | None:
            theirs, ours = (info.fingerprint, info.dtype), (own.fingerprint, own.dtype)
            return None if theirs == ours else f"it serves {theirs}, this worker {ours}"

        inbox = Inbox(InboxConfig(reader=self.name, settings=self._reading(vision, placement)))
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
            self.metrics,
            decoder=decoder,
            threads=self.settings.stages.preprocess_threads,
            died=self.died,
        )

    def _decoder(self, model: Model, vision: VisionSpec) -> Decoder:
        stages = self.settings.stages
        if stages.preprocess == "threads":
            return ThreadDecoder(model, max_pixels=self.settings.max_image_pixels)
        limits = Limits(
            seconds=stages.preprocess_seconds,
            memory_bytes=stages.preprocess_mb << 20,
            max_pixels=self.settings.max_image_pixels,
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
            model=self.settings.served_model_name,
            fingerprint=model.fingerprint,
            dtype=placement.dtype,
            rounding=self._rounding(vision),
            width=model.output.width,
            row_width=0 if vision is None else vision.row_width,
            images=vision is not None and (self.settings.mode is not Mode.EMBED or self.settings.images),
            host=host_id(),
            slabs=slabs,
        )

    def _rounding(self, spec: VisionSpec | None) -> str:
        stages, mode = self.settings.stages, self.settings.mode
        vision = "" if mode is Mode.EMBED or spec is None else rounding(stages.vision)
        text = "" if mode is Mode.ENCODE else rounding(stages.text)
        return f"{vision}; {text}" if vision or text else ""


def _batches(placement: Placement, nbytes: int) -> int:
    # On a GPU the next batch is launched before the last has finished. An eighth more for what allocators
    # keep between tensors of different sizes: 5 to 6 % were measured on CPU at full size.
    return nbytes * 9 // 8 * (2 if placement.is_cuda else 1)


async def _timed(what: str, make: Callable[[], T]) -> T:
    # Off the event loop, which has a signal to answer and a lease to keep meanwhile.
    started = time.perf_counter()
    made = await asyncio.to_thread(make)
    log.info("%s in %.1f s", what, time.perf_counter() - started)
    return made
