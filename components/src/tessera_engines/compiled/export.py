"""A stage as an exported program: traced once, for every size in the ranges of its axes."""

from __future__ import annotations

import warnings

import torch
from torch.export import Dim, ExportedProgram

from tessera.dtypes import DTYPES
from tessera.errors import EngineBuildFailed
from tessera.models.stages import StageModule
from tessera_engines.compiled.spec import AxisRanges


def export_stage(stage: StageModule, ranges: AxisRanges, *, device: str) -> ExportedProgram:
    """Trace a stage with ``torch.export``; raises ``EngineBuildFailed`` when that fails."""
    # An axis that can only be 1 is exported as the constant 1.
    axes = {
        name: Dim(name, min=1, max=sizes.max) if sizes.max > 1 else None for name, sizes in ranges.items()
    }
    shapes = tuple(
        {number: axes[axis] for number, axis in enumerate(tensor.axes) if isinstance(axis, str)}
        for tensor in stage.inputs
    )
    try:
        # torch warns of its own deprecated internals.
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(
                stage.module, example_inputs(stage, ranges, device=device), dynamic_shapes=shapes
            )
    except Exception as error:
        raise EngineBuildFailed(f"torch.export: {type(error).__name__}: {error}") from error


def example_inputs(stage: StageModule, ranges: AxisRanges, *, device: str) -> tuple[torch.Tensor, ...]:
    """Inputs of zeros, of the sizes to tune for."""
    return tuple(
        torch.zeros(
            [_example(axis, ranges) for axis in tensor.axes], dtype=DTYPES[tensor.dtype].torch, device=device
        )
        for tensor in stage.inputs
    )


def _example(axis: int | str, ranges: AxisRanges) -> int:
    if isinstance(axis, int):
        return axis
    # A size of 1 would be taken for a constant.
    return min(max(2, ranges[axis].opt), ranges[axis].max)
