"""Tells an engine's errors apart: a batch that was too large, a batch that failed, a device that is gone.

An illegal access, an assertion on the device or a failed chip leaves a process's CUDA context unusable: every
later call fails, and only a new process helps. Running out of memory passes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from tessera.engine.base import TextEngine, VisionEngine
from tessera.engine.batch import Cost, TextBatch, TextOutput, VisionBatch
from tessera.errors import EngineDead, EngineFailed
from tessera.launched import Launched

log = logging.getLogger(__name__)


def translate(error: Exception) -> Exception:
    """``EngineDead`` if the device runs nothing more, ``EngineFailed`` if memory ran out, else ``error``.

    After running out of memory the allocator's cache is freed, so that a smaller batch can be tried.
    """
    if isinstance(error, torch.OutOfMemoryError):
        # The traceback holds the tensors of the batch that was too large.
        error.__traceback__ = None
        # It does nothing where CUDA was never used.
        torch.cuda.empty_cache()
        return EngineFailed(f"out of memory: {_first_line(error)}")
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
        return EngineDead(f"the device failed: {_first_line(error)}") if _is_gone() else error
    return error


def _is_gone() -> bool:
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class GuardedVisionEngine:
    """A ``VisionEngine`` that raises ``EngineDead`` and ``EngineFailed``, see ``translate``."""

    def __init__(self, engine: VisionEngine) -> None:
        self._engine = engine
        self.takes_floats = engine.takes_floats
        self.cost: Cost = engine.cost
        self.depth = engine.depth
        self.warm = engine.warm
        self.close = engine.close

    def launch(self, batch: VisionBatch, out: Sequence[torch.Tensor]) -> Launched[object]:
        try:
            return self._engine.launch(batch, out).map_error(translate)
        except Exception as error:
            raise translate(error) from error


class GuardedTextEngine:
    """A ``TextEngine`` that raises ``EngineDead`` and ``EngineFailed``, see ``translate``."""

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine
        self.gives_states = engine.gives_states
        self.cost: Cost = engine.cost
        self.depth = engine.depth
        self.warm = engine.warm
        self.close = engine.close

    def launch(self, batch: TextBatch) -> Launched[TextOutput]:
        try:
            return self._engine.launch(batch).map_error(translate)
        except Exception as error:
            raise translate(error) from error

    def launch_states(self, batch: TextBatch) -> Launched[TextOutput]:
        try:
            return self._engine.launch_states(batch).map_error(translate)
        except Exception as error:
            raise translate(error) from error
