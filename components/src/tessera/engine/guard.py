"""Tells an engine's errors apart: a batch that was too large, a batch that failed, a device that is gone.

An illegal access, an assertion on the device or a failed chip leaves a process's CUDA context unusable: every
later call fails, and only a new process helps. Running out of memory passes.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
import torch

from tessera.engine.base import TextEngine, VisionEngine, vision_of
from tessera.engine.batch import Cost, blank, zeros
from tessera.engine.placement import Placement
from tessera.errors import EngineDead, EngineFailed
from tessera.launched import guarded
from tessera.models.base import Model

log = logging.getLogger(__name__)

_WARM_TOKENS: Final = 8


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


class _Guarded:
    """What both guarded engines share; ``stage`` names them in errors."""

    stage: str

    def __init__(self, engine: VisionEngine | TextEngine, model: Model) -> None:
        self._warm = engine.warm
        self._model = model
        self.cost: Cost = engine.cost
        self.depth = engine.depth
        self.close = engine.close

    def warm(self) -> None:
        """Warm the engine; raises ``EngineFailed`` for rows that are not finite, too."""
        self._warm()
        if not self._gives_finite_rows():
            raise EngineFailed(
                f"the {self.stage} engine gave outputs that are not finite when it was warmed:"
                " the checkpoint's weights are damaged, or do not suit this engine"
            )

    def _gives_finite_rows(self) -> bool:
        raise NotImplementedError


class GuardedVisionEngine(_Guarded):
    """A ``VisionEngine`` that raises ``EngineDead`` and ``EngineFailed``, see ``translate``.

    Its warm-up ends with a look at the rows of a black image.
    """

    stage = "vision"

    def __init__(self, engine: VisionEngine, model: Model, placement: Placement) -> None:
        super().__init__(engine, model)
        self._placement = placement
        self.takes_floats = engine.takes_floats
        self.launch = guarded(engine.launch, translate)

    def _gives_finite_rows(self) -> bool:
        spec = vision_of(self._model)
        batch = blank(self._model, spec.least_units)
        out = [self._placement.rows(plan.rows, spec.row_width) for plan in batch.plans]
        self.launch(batch, out).result()
        return all(bool(rows.isfinite().all()) for rows in out)


class GuardedTextEngine(_Guarded):
    """A ``TextEngine`` that raises ``EngineDead`` and ``EngineFailed``, see ``translate``.

    Its warm-up ends with a look at the rows of a short text.
    """

    stage = "text"

    def __init__(self, engine: TextEngine, model: Model) -> None:
        super().__init__(engine, model)
        self.gives = engine.gives
        self.launch = guarded(engine.launch, translate)
        self.launch_named = guarded(engine.launch_named, translate)

    def _gives_finite_rows(self) -> bool:
        output = self.launch(zeros(self._model, _WARM_TOKENS, _WARM_TOKENS)).result()
        return bool(np.isfinite(output.values).all() and np.isfinite(output.norms).all())
