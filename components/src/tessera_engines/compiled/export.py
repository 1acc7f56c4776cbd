"""A stage as an exported program: traced once, for every size in the ranges of its axes."""

from __future__ import annotations

import warnings

import torch
from torch.export import Dim, ExportedProgram

from tessera.dtypes import DTYPES
from tessera.errors import EngineBuildFailed
from tessera.models.stages import StageModule, StageTensor
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
    """Inputs of the sizes to tune for: zeros, and the ends of sequences of one token each."""
    return tuple(_example_input(tensor, ranges, device=device) for tensor in stage.inputs)


def _example_input(tensor: StageTensor, ranges: AxisRanges, *, device: str) -> torch.Tensor:
    shape = [_example(axis, ranges) for axis in tensor.axes]
    dtype = DTYPES[tensor.dtype].torch
    # A sequence without tokens has no last one to pool: a card ends the process for its index.
    if tensor.name == "ends":
        return torch.arange(1, shape[0] + 1, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def _example(axis: int | str, ranges: AxisRanges) -> int:
    if isinstance(axis, int):
        return axis
    # A size of 1 would be taken for a constant.
    return min(max(2, ranges[axis].opt), ranges[axis].max)
