"""Runs of an engine at fixed addresses: from a recorded graph where there is one, else as they come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from tessera.engine.streams import Streams
from tessera.engine.tensorrt.loaded import Context, LoadedEngine

log = logging.getLogger(__name__)

_Key = tuple[object, ...]


class Replays:
    """A context for each profile, and one for each recorded graph, since a graph binds its context."""

    def __init__(self, loaded: LoadedEngine, streams: Streams) -> None:
        self._loaded: LoadedEngine | None = loaded
        self._streams = streams
        self._plain: dict[int, Context] = {}
        self._graphs: dict[_Key, tuple[Context, Callable[[], None]]] = {}

    def run(self, profile: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put one run on the compute stream; the tensors are as large as its shapes."""
        recorded = self._graphs.get(_key(profile, tensors))
        if recorded is not None:
            recorded[1]()
            return
        context = self._plain.get(profile)
        if context is None:
            context = self._plain[profile] = self._context(profile)
        context.bind(tensors)
        context.run(self._streams.handle)

    def record(self, profile: int, tensors: Mapping[str, torch.Tensor]) -> None:
        context = self._context(profile)
        context.bind(tensors)
        if not context.capturable(self._streams.handle):
            log.info("profile %d cannot be recorded as a graph and is run as it comes", profile)
            return
        replay, _ = self._streams.record(lambda: context.run(self._streams.handle))
        self._graphs[_key(profile, tensors)] = (context, replay)

    @property
    def recorded(self) -> int:
        return len(self._graphs)

    def close(self) -> None:
        self._graphs.clear()
        self._plain.clear()
        self._loaded = None

    def _context(self, profile: int) -> Context:
        assert self._loaded is not None
        return self._loaded.context(profile, self._streams.handle)


def _key(profile: int, tensors: Mapping[str, torch.Tensor]) -> _Key:
    """Shapes and addresses: a graph has both built in."""
    return (profile, *((name, tensors[name].data_ptr(), tensors[name].shape) for name in sorted(tensors)))
