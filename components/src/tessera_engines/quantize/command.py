"""``tessera engine quantize``: from a checkpoint and real inputs to a checkpoint in FP8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import tessera
from tessera.atomic_directory import atomic_directory
from tessera.errors import ConfigError
from tessera.models.base import Feature, Model
from tessera.models.declared import declared_of
from tessera.nn.layer import Stack, Tower
from tessera_engines.calibration import Calibration
from tessera_engines.quantize.checkpoint import parts_of, write
from tessera_engines.quantize.inputs import Inputs
from tessera_engines.quantize.tower import QuantizedTower, quantized

Stages = Literal["text", "vision", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is quantized with which inputs, in float32 on ``device``.

    ``most_loss`` is of each stage, as ``tower.loss_of`` has it.
    """

    source: Calibration
    out: Path
    stages: Stages
    most_inputs: int
    most_loss: float
    device: str


def quantize(model: Model, request: Request, progress: Callable[[str], None]) -> dict[str, QuantizedTower]:
    """Write the checkpoint, and return what was found by stage.

    Raises ``ConfigError`` for a family without products in FP8, a transformer in a folder of its own, a stage
    that the family lacks or that the source has no inputs for, and a directory that exists;
    ``CheckpointError`` for weights that cannot be read.
    """
    if Feature.FP8 not in model.features:
        raise ConfigError(f"the modules of family {model.family} have no FP8 form")
    if below := declared_of(model).folder:
        raise ConfigError(f"{model.path}: a transformer in a folder of its own, {below}, is not quantized")
    if request.stages == "vision" and model.vision is None:
        raise ConfigError(f"{model.family} reads text alone: it has no vision stage")
    with atomic_directory(request.out) as folder:
        inputs = Inputs.of(model, request.source, request.most_inputs, request.device)
        form: dict[str, Any] = {"dtype": "float32", "device": request.device}
        found: dict[str, QuantizedTower] = {}
        rows: list[torch.Tensor] = []
        if model.vision is not None and (request.stages != "text" or inputs.images):
            progress("loading the vision stage")
            vision = model.load_vision(**form)
            if request.stages != "text":
                if not inputs.images:
                    raise ConfigError("calibration: the source holds no image for the vision stage")
                found["vision"] = quantized(
                    _stack(vision),
                    lambda: torch.cat(inputs.vision_rows(vision)),
                    most_loss=request.most_loss,
                    progress=progress,
                )
            rows = inputs.vision_rows(vision)
        if request.stages != "vision":
            progress("loading the text stage")
            text = model.load_text(**form)
            batches = inputs.with_images(rows)
            if not batches:
                raise ConfigError("calibration: the source holds no line of text for the text stage")
            found["text"] = quantized(
                _stack(text),
                lambda: inputs.outputs(text, batches),
                most_loss=request.most_loss,
                progress=progress,
            )
        progress("writing the checkpoint")
        weights = {one: weight for tower in found.values() for one, weight in tower.weights.items()}
        if not weights:
            raise ConfigError(f"every layer costs more than {request.most_loss}: nothing is left to quantize")
        write(model.path, folder, parts_of(weights), {"name": "tessera", "version": tessera.__version__})
    return found


def _stack(module: object) -> Stack:
    """The layers of a tower; raises ``ConfigError`` for a module without any."""
    if not isinstance(module, Tower):
        raise ConfigError(f"{type(module).__name__} has no layers that can be quantized")
    return module.stack
