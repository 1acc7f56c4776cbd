"""How an engine computes a stage's products: what its config asks for, on this device, of this checkpoint.

``auto`` is resolved here, once, before anything is loaded: memory, cache keys and what is told of a worker
follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Final, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
import torch

from tessera.checkpoint.loading import as_stored
from tessera.checkpoint.quantized import Quantization
from tessera.checkpoint.safetensors import StoredTensor
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError
from tessera.models.base import Feature, Model

AUTO: Final = "auto"
NONE: Final = "none"
STORED: Final = "stored"
FP8: Final = "fp8"

M = TypeVar("M")
Stage = Literal["vision", "text"]

# Ada, the first generation whose tensor cores multiply FP8.
_LEAST_CAPABILITY: Final = (8, 9)
_LAYER: Final = re.compile(r"\.(layers|blocks)\.\d+\.")
_TEXT: Final = "text."
# Of a float32 scale.
_SCALE_BYTES: Final = 4


@runtime_checkable
class Quantisable(Protocol):
    """A module that can run its GEMMs in FP8, but for ``keep`` blocks at each end."""

    def quantise(self, *, keep: int) -> None: ...


@runtime_checkable
class Stores(Protocol):
    """A model that knows the place of each of its tensors, by canonical name."""

    def all_tensors(self) -> Mapping[str, StoredTensor]: ...


def stored_weights(model: Model, stage: Stage) -> list[StoredTensor]:
    """Return the weights of a stage's layers that products in FP8 take as they are stored.

    Raises ``CheckpointError`` for a checkpoint that cannot be read.
    """
    if Feature.FP8 not in model.features or not isinstance(model, Stores):
        return []
    if Quantization.read(model.path) is None:
        return []
    return [
        tensor
        for name, tensor in model.all_tensors().items()
        if tensor.in_fp8 and _LAYER.search(name) and name.startswith(_TEXT) == (stage == "text")
    ]


def resolved(model: Model, stage: Stage, settings: EngineSettings, placement: Placement) -> EngineSettings:
    """Return the settings without ``auto``: ``stored`` where checkpoint and device have FP8, else ``none``.

    Raises ``CheckpointError`` for a checkpoint that cannot be read.
    """
    if settings.quantization != AUTO:
        return settings
    # The device is asked last: most checkpoints need not know.
    held = settings.engine == "torch" and stored_weights(model, stage) and obstacle(placement) is None
    return msgspec.structs.replace(settings, quantization=STORED if held else NONE)


def obstacle(placement: Placement) -> str | None:
    """Return what products in FP8 need that this place is not, in words."""
    if not placement.is_cuda or torch.cuda.get_device_capability(placement.device) < _LEAST_CAPABILITY:
        return f"needs a CUDA device of capability 8.9 or above, not {placement.device}"
    if placement.dtype != "bfloat16":
        return f"needs dtype bfloat16, not {placement.dtype}"
    return None


def require(model: Model, stage: Stage, settings: EngineSettings, placement: Placement) -> None:
    """Raises ``ConfigError`` where settings ask for what family, device or checkpoint cannot."""
    asked = settings.quantization
    if asked == NONE:
        return
    if Feature.FP8 not in model.features:
        raise ConfigError(f"quantization {asked}: the modules of family {model.family} have no FP8 form")
    if (why := obstacle(placement)) is not None:
        raise ConfigError(f"quantization {asked} {why}")
    if asked == STORED and not stored_weights(model, stage):
        raise ConfigError(
            f"quantization stored: {model.path} has no weights of the {stage} stage that products in FP8 take"
        )


def loaded(
    load: Callable[..., M], model: Model, stage: Stage, settings: EngineSettings, placement: Placement
) -> M:
    """Return the module that ``load`` makes, with products in FP8 if the config says so.

    Raises ``ConfigError`` before anything is loaded if it asks for what ``require`` refuses.
    """
    settings = resolved(model, stage, settings, placement)
    require(model, stage, settings, placement)
    with nullcontext() if settings.quantization == NONE else as_stored():
        module = load(dtype=placement.dtype, device=placement.device)
    if settings.quantization == FP8:
        assert isinstance(module, Quantisable)
        with torch.inference_mode():
            module.quantise(keep=settings.unquantized_blocks)
    return module


def saved_bytes(model: Model, stage: Stage, settings: EngineSettings, placement: Placement) -> int:
    """Return what the stage's weights take less of memory than all of them in the dtype would."""
    if settings.quantization not in (STORED, FP8):
        return 0
    whole = placement.torch_dtype.itemsize
    return sum(
        tensor.count * (whole - 1) - tensor.shape[0] * _SCALE_BYTES for tensor in stored_weights(model, stage)
    )


def said(model: Model, stage: Stage, settings: EngineSettings, placement: Placement) -> str:
    """Return the stage's precision in words, for the log."""
    count, products = len(stored_weights(model, stage)), ""
    if settings.quantization == STORED:
        products = f", {count} weights in FP8 with the checkpoint's scales"
    elif settings.quantization == FP8:
        products = f", products in FP8 but for {settings.unquantized_blocks} blocks at each end"
        products += f", {count} weights with the checkpoint's scales" if count else ""
    elif count:
        products = f", {count} weights in FP8 multiplied out"
    return f"{stage} {placement.dtype}{products}"
