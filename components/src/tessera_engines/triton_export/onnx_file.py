"""A stage as an ONNX file, through ``torch.export``."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from tessera.errors import EngineBuildFailed
from tessera.extras import absent, missing
from tessera.models.stages import StageModule
from tessera_engines.compiled.export import export_stage
from tessera_engines.compiled.spec import AxisRanges

OPSET = 20
"""The first with GELU as one operator, and old enough for every server in use.

Opset 23 would make attention one operator, too, but its kernels are rare: TensorRT fails to build where it
has none for a shape, and ONNX Runtime has none on CUDA. As GEMMs and a softmax each server can fuse it.
"""

_LARGEST_INLINE = 1 << 30
"""Weights of more bytes than this go to a file beside the model, since protobuf ends at 2 GiB."""


def write_onnx(stage: StageModule, ranges: AxisRanges, path: Path) -> tuple[Path, ...]:
    """Write ``path``, and its weights beside it if they are large; returns the files.

    Axes that are open carry their names. Raises ``EngineBuildFailed``, and ``ConfigError``
    where the exporter is not installed.
    """
    require_exporter()
    program = export_stage(stage, ranges, device="cpu")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # It reports on operators of packages that are not used.
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            converted = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=[tensor.name for tensor in stage.inputs],
                output_names=[tensor.name for tensor in stage.outputs],
                verbose=False,
            )
        assert converted is not None
        _name_axes(converted.model.graph, stage, ranges)
        large = sum(one.nbytes for one in stage.module.parameters()) > _LARGEST_INLINE
        converted.save(path, external_data=large)
    except Exception as error:
        raise EngineBuildFailed(f"torch.onnx: {type(error).__name__}: {error}") from error
    data = path.with_name(path.name + ".data")
    return (path, data) if large else (path,)


def require_exporter() -> None:
    """Check that the exporter is installed; raises ``ConfigError`` naming the packages that are missing."""
    if lacking := absent("onnx", "onnxscript"):
        raise missing("an export", *lacking, extra="export")


def _name_axes(graph: Any, stage: StageModule, ranges: AxisRanges) -> None:
    """Name the open axes, in place of the exporter's numbered symbols."""
    import onnx_ir

    named: dict[str, str] = {}
    for value, tensor in zip(graph.inputs, stage.inputs, strict=True):
        for size, axis in zip(value.shape, tensor.axes, strict=True):
            if isinstance(axis, str) and ranges[axis].max > 1:
                named[str(size)] = axis
    for value in (*graph.inputs, *graph.outputs):
        value.shape = onnx_ir.Shape(
            [size if isinstance(size, int) else named.get(str(size), str(size)) for size in value.shape]
        )
