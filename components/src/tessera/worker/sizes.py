"""The sizes of a worker's batches, queues and caches: those that are given, and what fits for the others.

All of them are in the worker's memory account, by which sizes are chosen, and which refuses what was given
and does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import torch

from tessera import machine
from tessera.defaults import TEXT_BATCH, Share, is_small
from tessera.engine.placement import Placement, place
from tessera.engine.quantization import Stage, resolved, saved_bytes
from tessera.engine.settings import EngineSettings
from tessera.models.base import Model, VisionSpec, parameters_of
from tessera.settings import GIB, MIB
from tessera.transport.settings import TransportSettings
from tessera.worker.memory import RUNTIME_BYTES, MemoryAccount, all_bytes, free_bytes
from tessera.worker.settings import Mode, StageSettings, WorkerSettings

BLOCK_ROWS: Final = 64
"""Rows that slots of the slab are multiples of.

A page of 1,776 rows loses 1 % to it, a tile of 256 nothing; each block has two words that say whose it is.
"""

PARTS: Final = (1, 2, 4, 8)
"""What is chosen shrinks together until it fits: to a part of what it would be."""
OF_CARD: Final = 0.9
"""What of a card an account may take. CUDA graphs and the workspaces of libraries are in none."""

Place = Callable[[EngineSettings], Placement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where a worker runs: its share, where its engines are placed, and a device's bytes, free and in all."""

    share: Share
    place: Place = place
    free: Callable[[str], int] = free_bytes
    most: Callable[[str], int] = all_bytes


def share_of(settings: WorkerSettings) -> Share:
    """What this worker has of its machine. Raises ``ConfigError`` for a device that is not there."""
    stages, mode = settings.stages, settings.mode
    run = ([] if mode is Mode.EMBED else [stages.vision]) + ([] if mode is Mode.ENCODE else [stages.text])
    return Share(
        cores=machine.cores(),
        nbytes=machine.memory_bytes(),
        beside=settings.host_workers,
        on_card=all(place(stage).is_cuda for stage in run),
    )


def running(settings: WorkerSettings, model: Model) -> dict[Stage, EngineSettings]:
    """The engines of a worker by their stages."""
    engines: dict[Stage, EngineSettings] = {}
    if settings.mode is not Mode.EMBED and model.vision is not None:
        engines["vision"] = settings.stages.vision
    if settings.mode is not Mode.ENCODE:
        engines["text"] = settings.stages.text
    return engines


def precise(given: WorkerSettings, model: Model, place: Place = place) -> WorkerSettings:
    """The settings with the products of the stages that run decided; raises ``CheckpointError``."""
    decided = {
        stage: resolved(model, stage, engine, place(engine))
        for stage, engine in running(given, model).items()
    }
    return msgspec.structs.replace(given, stages=msgspec.structs.replace(given.stages, **decided))


def sized(given: WorkerSettings, model: Model, room: Room) -> WorkerSettings:
    """The settings with a number for each size that was left open: the largest that fit."""
    for part in PARTS:
        settings = sized_at(given, model, room, part)
        if _fits(account_of(settings, model, room.place), settings, room):
            break
    return settings


def _fits(account: MemoryAccount, settings: WorkerSettings, room: Room) -> bool:
    # Workers that start together all find the whole machine free.
    on_host = settings.host_workers * (1 if settings.mode is Mode.AGG else 2)
    for device in account.devices:
        on_card = device != "cpu"
        equal = 1 / (settings.card_workers if on_card else on_host)
        share = (settings.card_share if on_card else settings.host_share) or equal
        left = min(room.free(device), room.most(device) * share) * (OF_CARD if on_card else 1.0)
        if account.needed(device) > left:
            return False
    return True


def sized_at(given: WorkerSettings, model: Model, room: Room, part: int) -> WorkerSettings:
    """The settings with a number for each size that was left open, at one over ``part`` of the largest."""
    stages, vision, share = given.stages, model.vision, room.share
    cache_bytes = given.cache_bytes
    if vision is not None and given.mode is not Mode.EMBED:
        engine = _vision(stages.vision, vision, share, part)
        decoders = stages.preprocess_threads or share.decoders(small=is_small(parameters_of(model)))
        stages = msgspec.structs.replace(stages, vision=engine, preprocess_threads=decoders)
    if given.mode is not Mode.ENCODE:
        queue = stages.text.max_queue_cost or share.text_queue(stages.text.max_batch_cost)
        batch = stages.text.max_batch_cost or min(TEXT_BATCH // part, queue)
        text = msgspec.structs.replace(stages.text, max_batch_cost=batch, max_queue_cost=queue)
        stages = msgspec.structs.replace(stages, text=text)
    if cache_bytes is None:
        cache_bytes = share.cache_bytes() // part if caches(given, vision) else 0
    if vision is not None:
        transport = _transport(given, stages, vision, room, part)
        stages = msgspec.structs.replace(stages, transport=transport)
    return msgspec.structs.replace(given, stages=stages, cache_bytes=cache_bytes)


def caches(settings: WorkerSettings, vision: VisionSpec | None) -> bool:
    """Whether a worker keeps vision rows: of two kinds that which answers with them, or what they become."""
    if vision is None:
        return False
    return settings.mode is not (Mode.EMBED if vision.gives_output else Mode.ENCODE)


def _vision(given: EngineSettings, vision: VisionSpec, share: Share, part: int) -> EngineSettings:
    largest, values = vision.max_units, math.prod(vision.unit_shape)
    whole = share.vision_units(largest=largest, values=values)
    batch = given.max_batch_cost or largest * max(1, whole // largest // part)
    queue = given.max_queue_cost or max(batch, share.vision_queue(batch=whole, values=values))
    # Below the largest image nothing is gained: that runs alone.
    return msgspec.structs.replace(given, max_batch_cost=min(batch, queue), max_queue_cost=queue)


def _transport(
    given: WorkerSettings, stages: StageSettings, vision: VisionSpec, room: Room, part: int
) -> TransportSettings:
    transport, images = stages.transport, vision.largest
    if given.mode is Mode.ENCODE and not transport.slab_mb:
        row = vision.row_width * room.place(stages.vision).torch_dtype.itemsize
        rows = stages.vision.max_batch_cost * images.rows // images.units
        transport = msgspec.structs.replace(
            transport, slab_mb=room.share.slab_bytes(rows * row) // part // MIB
        )
    if given.mode is Mode.EMBED and given.images and not transport.staging_mb:
        # The rows of one batch.
        row = vision.row_width * room.place(stages.text).torch_dtype.itemsize
        staging = -(-stages.text.max_batch_cost * row // MIB)
        transport = msgspec.structs.replace(transport, staging_mb=staging)
    return transport


def account_of(settings: WorkerSettings, model: Model, place: Place = place) -> MemoryAccount:
    """Everything of a size that the settings decide."""
    vision, stages, account = model.vision, settings.stages, MemoryAccount()
    account.add("interpreter and libraries", "cpu", RUNTIME_BYTES)
    if settings.mode is not Mode.EMBED and vision is not None:
        at = place(stages.vision)
        units = max(stages.vision.max_batch_cost, vision.max_units)
        saved = saved_bytes(model, "vision", stages.vision, at)
        account.add(_weights("vision", saved), at.device, model.vision_nbytes(at.dtype) - saved)
        batch = model.vision_activation_nbytes(at.dtype, units)
        account.add(f"vision batch of {units} units", at.device, _batches(at, batch))
        if settings.mode is Mode.ENCODE:
            slab = slab_rows(stages.transport, vision, at) * vision.row_width * at.torch_dtype.itemsize
            account.add("slab", at.device, slab)
            if at.is_cuda:
                account.add("pinned copy of the slab", "cpu", slab)
    if settings.mode is not Mode.ENCODE:
        at = place(stages.text)
        tokens = max(stages.text.max_batch_cost, model.max_tokens)
        saved = saved_bytes(model, "text", stages.text, at)
        account.add(_weights("text", saved), at.device, model.text_nbytes(at.dtype) - saved)
        batch = model.text_activation_nbytes(at.dtype, tokens)
        account.add(f"text batch of {tokens} tokens", at.device, _batches(at, batch))
    if caches(settings, vision):
        account.add("cache of vision rows", "cpu", settings.cache_bytes or 0)
    if settings.mode is Mode.EMBED and settings.images and vision is not None:
        staging = reading(stages.transport, vision, at).staging_mb * MIB
        account.add("staging for NIXL", "cpu", staging)
    return account


def _weights(stage: str, saved: int) -> str:
    return f"{stage} weights, some in FP8" if saved else f"{stage} weights"


def _batches(placement: Placement, nbytes: int) -> int:
    # On a GPU the next batch is launched before the last has finished. An eighth more for what allocators
    # keep between tensors of different sizes: 5 to 6 % were measured on CPU at full size.
    return nbytes * 9 // 8 * (2 if placement.is_cuda else 1)


def slab_rows(settings: TransportSettings, vision: VisionSpec, placement: Placement) -> int:
    """Rows of an encode worker's slab, in whole blocks."""
    row_bytes = vision.row_width * placement.torch_dtype.itemsize
    # However small it is set, the largest image must fit.
    rows = max(settings.slab_mb * MIB // row_bytes, vision.max_rows)
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def reading(settings: TransportSettings, vision: VisionSpec, placement: Placement) -> TransportSettings:
    """The hand-off's settings of a reader, whose staging memory holds the largest image at least."""
    nbytes = vision.max_rows * vision.row_width * placement.torch_dtype.itemsize
    return msgspec.structs.replace(settings, staging_mb=max(settings.staging_mb, -(-nbytes // MIB)))


def said(settings: WorkerSettings, given: WorkerSettings, model: Model, share: Share) -> str:
    """One line: what the worker has of its machine, and every size, with those that were given marked."""
    stages, was, mode = settings.stages, given.stages, settings.mode
    beside = f" for {share.beside} {mode} workers" if share.beside > 1 else ""
    found = [_number(torch.get_num_threads(), "thread", was.threads)]
    if mode is not Mode.EMBED and model.vision is not None:
        found.append(_number(stages.preprocess_threads, "image decoder", was.preprocess_threads))
        found.append(f"vision {_stage(stages.vision, was.vision, 'unit')}")
    if mode is not Mode.ENCODE:
        found.append(f"text {_stage(stages.text, was.text, 'token')}")
    if mode is Mode.ENCODE:
        found.append(f"slab {_number(stages.transport.slab_mb, 'MiB', was.transport.slab_mb)}")
    if caches(settings, model.vision):
        cache = f"{(settings.cache_bytes or 0) / GIB:.1f} GiB"
        found.append(f"cache of vision rows {cache}{'' if given.cache_bytes is None else ' (given)'}")
    where = f"{share.cores} cores and {share.nbytes / GIB:.1f} GiB{beside}"
    return f"{where}: {', '.join(found)}"


def _stage(settings: EngineSettings, was: EngineSettings, unit: str) -> str:
    batch = _number(settings.max_batch_cost, unit, was.max_batch_cost)
    return f"{batch} a batch and {_number(settings.max_queue_cost, '', was.max_queue_cost)} waiting"


def _number(number: int, unit: str, was: int) -> str:
    plural = "s" if unit and unit != "MiB" and number != 1 else ""
    return f"{number:,} {unit}{plural}".rstrip() + (" (given)" if was else "")
