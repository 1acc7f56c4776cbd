"""Builds the torch modules and fills them from the weight files, one tensor at a time.

Modules are built without storage. Each parameter then gets its memory and is read into it directly, so
the process never holds more than the weights and one staging buffer; memory-mapping the files instead
would count every page touched against the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from tessera.checkpoint.safetensors import StoredTensor
from tessera.checkpoint.weights import stored_tensors
from tessera.dtypes import BY_SAFETENSORS, FLOATS
from tessera.errors import CheckpointError, ConfigError
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.text import TextTower
from tessera.models.llama_nemotron_vl.vision import VisionTower

_STAGING_BYTES = 32 << 20

# one product instead of several: the parameter on the left is its sources' rows, one after another
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load_vision(path: Path, config: ModelConfig, *, dtype: str, device: str) -> VisionTower:
    """The encoder and projector on ``device``; raises ``CheckpointError``."""
    tensors = stored_tensors(path, config)
    with torch.device("meta"):
        tower = VisionTower(config)
    fill(tower, tensors, part="", dtype=torch_dtype(dtype), device=torch.device(device))
    tower.vision.embeddings.place_constants(config.image, torch.device(device))
    tower.prepare(torch.device(device), torch_dtype(dtype))
    return tower.eval()


def load_text(path: Path, config: ModelConfig, *, dtype: str, device: str) -> TextTower:
    """The backbone on ``device``; raises ``CheckpointError``."""
    tensors = stored_tensors(path, config)
    with torch.device("meta"):
        tower = TextTower(config.text)
    fill(tower, tensors, part="text.", dtype=torch_dtype(dtype), device=torch.device(device))
    tower.place_constants(torch.device(device))
    return tower.eval()


def torch_dtype(name: str) -> torch.dtype:
    """The type of that name; raises ``ConfigError`` for one that modules are not loaded in."""
    if name not in FLOATS:
        raise ConfigError(f"dtype {name!r} is none of {sorted(FLOATS)}")
    return FLOATS[name].torch


def fill(
    module: nn.Module,
    tensors: Mapping[str, StoredTensor],
    *,
    part: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace every parameter of ``module`` by one with storage, read from its sources.

    ``part`` is what precedes the parameters' names in the tensors' canonical names.
    """
    with _Reader() as reader:
        for name, placeholder in list(module.named_parameters()):
            value = torch.empty(placeholder.shape, dtype=dtype, device=device)
            flat = value.view(-1)
            offset = 0
            for source in _sources(part + name):
                tensor = tensors[source]
                count = tensor.nbytes // BY_SAFETENSORS[tensor.dtype].itemsize
                reader.read(tensor, flat[offset : offset + count])
                offset += count
            assert offset == flat.numel(), f"{name} was filled with {offset} of {flat.numel()} numbers"
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


def _sources(name: str) -> list[str]:
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]


class _Reader:
    """Reads tensors from open files; holds one staging buffer for those that have to be converted."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._staging: torch.Tensor | None = None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read(self, tensor: StoredTensor, into: torch.Tensor) -> None:
        """Read all of ``tensor`` into the one-dimensional ``into``, converting and copying as needed."""
        stored = BY_SAFETENSORS[tensor.dtype].torch
        if into.device.type == "cpu" and into.dtype == stored:
            self._read_bytes(tensor, 0, into.view(torch.uint8))
            return
        if self._staging is None:
            self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8)
        for start in range(0, tensor.nbytes, _STAGING_BYTES):
            chunk = self._staging[: min(_STAGING_BYTES, tensor.nbytes - start)]
            self._read_bytes(tensor, start, chunk)
            first, size = start // stored.itemsize, chunk.numel() // stored.itemsize
            into[first : first + size].copy_(chunk.view(stored))

    def _read_bytes(self, tensor: StoredTensor, start: int, into: torch.Tensor) -> None:
        buffer = into.numpy().data
        done = 0
        while done < len(buffer):
            read = os.preadv(self._descriptor(tensor.file), [buffer[done:]], tensor.start + start + done)
            if not read:
                raise CheckpointError(f"{tensor.file}: ends inside tensor {tensor.name!r}")
            done += read

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]
