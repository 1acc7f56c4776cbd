"""Which kinds this process can use, and how a transport of each is made."""

from __future__ import annotations

from typing import Final

import torch

from tessera.errors import ConfigError
from tessera.transport.base import KINDS, Transport
from tessera.transport.kinds.cuda_ipc import CudaIpcTransport
from tessera.transport.kinds.inline import InlineTransport
from tessera.transport.kinds.nixl import NixlTransport
from tessera.transport.kinds.nixl_agent import nixl_missing
from tessera.transport.kinds.shm import ShmTransport
from tessera.transport.settings import TransportSettings
from tessera.transport.slab.slab import Slab


def select_kinds(choice: str, *, slab_device: torch.device | None = None) -> tuple[str, ...]:
    """The kinds that ``choice`` stands for, best first.

    ``auto`` is every kind that works in this process; otherwise one kind or several with commas between
    them, each of which must work. ``slab_device`` is where a producer's slab lies, None for a reader.
    """
    if choice == "auto":
        return tuple(kind for kind in KINDS if _obstacle(kind, slab_device) is None)
    kinds = tuple(dict.fromkeys(part.strip() for part in choice.split(",")))
    for kind in kinds:
        obstacle = _obstacle(kind, slab_device)
        if obstacle is not None:
            raise ConfigError(f"transport {choice!r} cannot be used: {obstacle}")
    return tuple(kind for kind in KINDS if kind in kinds)


def _obstacle(kind: str, slab_device: torch.device | None) -> str | None:
    if kind not in KINDS:
        return f"{kind!r} is not one of auto, {', '.join(KINDS)}"
    if kind == "cuda_ipc":
        if not torch.cuda.is_available():
            return "cuda_ipc needs a CUDA device"
        if slab_device is not None and slab_device.type != "cuda":
            return "cuda_ipc needs a slab on a CUDA device"
    if kind == "nixl":
        return nixl_missing()
    return None


FROM_HOST_MEMORY: Final = frozenset((ShmTransport.kind, NixlTransport.kind))
"""The kinds whose readers copy a slab out of host memory, wherever it lies itself."""


def make_transport(kind: str, name: str, slab: Slab | None, settings: TransportSettings) -> Transport:
    """A transport of ``kind`` for the process called ``name``; with a slab it can publish."""
    if kind == NixlTransport.kind:
        return NixlTransport(name, slab, settings=settings)
    return {made.kind: made for made in (CudaIpcTransport, ShmTransport, InlineTransport)}[kind](name, slab)
