"""Writes a checkpoint in FP8 as NVIDIA's ModelOpt lays one out.

Each quantized weight is E4M3, with a float32 ``weight_scale`` and the ``input_scale`` of what it is
multiplied with beside it. Which algorithm that is and which modules are left out stands in ``config.json``
below ``quantization_config``, where vLLM looks, and in ``hf_quant_config.json``, where TensorRT-LLM does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from tessera.checkpoint.loading import opened
from tessera.checkpoint.quantized import MODELOPT_FILE
from tessera.checkpoint.safetensors import StoredTensor, WeightFile
from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.weight_names import HEAD_FILES, INDEX_FILE, SINGLE_FILE, STATE_FILE, STATE_INDEX_FILE
from tessera.checkpoint.weights import weight_files
from tessera.errors import ConfigError
from tessera.nn.fp8 import Fp8Weight
from tessera.nn.layer import Linear

_WEIGHT: Final = ".weight"
# Other forms of the weights, beside the files that are read.
_LEFT: Final = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".gguf", ".onnx")
_WRITTEN: Final = (INDEX_FILE, STATE_INDEX_FILE, CONFIG_FILE)
_LEFT_FOLDERS: Final = ("onnx", "openvino")
# Left out by name even where a checkpoint holds none: vLLM makes one for a decoder, and where nothing says
# that it is not in FP8, it waits for scales that no file has and ends.
_HEAD: Final = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stored tensor in FP8: e4m3 values as it is shaped, their one scale, and that of their inputs."""

    values: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor


def parts_of(weights: Mapping[Linear, Fp8Weight]) -> dict[str, Part]:
    """Take the products apart into the tensors that they were loaded from, by their stored names.

    Raises ``ConfigError`` for one that cannot be written so.
    """
    parts: dict[str, Part] = {}
    for linear, weight in weights.items():
        assert weight.input_scale is not None
        start = 0
        for tensor in linear.stored:
            _require_plain(tensor)
            stop = start + tensor.shape[0]
            parts[tensor.name] = Part(
                values=weight.values[start:stop].contiguous().cpu(),
                scale=weight.scales[0].cpu().clone(),
                input_scale=weight.input_scale.cpu().clone(),
            )
            start = stop
    return parts


def _require_plain(tensor: StoredTensor) -> None:
    if tensor.scales is not None:
        raise ConfigError(f"{tensor.file}: tensor {tensor.name!r} is quantized already")
    if tensor.added is not None:
        raise ConfigError(f"{tensor.name!r} has an adapter beside it: merge that into the weights before")
    if tensor.first is not None or not tensor.name.endswith(_WEIGHT):
        raise ConfigError(f"{tensor.file}: tensor {tensor.name!r} is no whole weight of a module")


def excludes(pattern: str, module: str) -> bool:
    """Whether an entry of the modules that are left out names this one, as readers of the layout take it.

    It is a module's name, that of one above it, a part of a name, or a wildcard.
    """
    return module == pattern or pattern in module or fnmatch(module, pattern)


def left_out(matrices: Iterable[str], quantized: Sequence[str]) -> list[str]:
    """Return the entries for modules with matrices that stay as they are, trees of them as ``name*``."""
    entries: list[str] = []
    for module in sorted(set(matrices) - set(quantized)):
        if any(excludes(entry, module) for entry in entries):
            continue
        names = module.split(".")
        above = (".".join(names[:length]) for length in range(1, len(names)))
        # A number is the beginning of others.
        trees = (f"{tree}*" for tree in above if not tree[-1].isdigit())
        entries.append(next((tree for tree in trees if _spares(tree, quantized)), module))
    return entries


def _spares(tree: str, quantized: Sequence[str]) -> bool:
    return not any(excludes(tree, module) or excludes(tree[:-1], module) for module in quantized)


def write(source: Path, out: Path, parts: Mapping[str, Part], about: Mapping[str, Any]) -> None:
    """Write the checkpoint at ``source`` into the empty ``out``, with these tensors in FP8.

    ``about`` says who made it. Raises ``CheckpointError`` for weight files that cannot be read.
    """
    files = weight_files(source, lambda name: False)
    _copy(source, out)
    placed: dict[str, str] = {}
    for file in files:
        name = SINGLE_FILE if file.path.name == STATE_FILE else f"{file.path.stem}.safetensors"
        placed |= dict.fromkeys(_write_file(file, out / name, parts), name)
    if {*placed.values()} != {SINGLE_FILE}:
        size = sum((out / name).stat().st_size for name in set(placed.values()))
        _write_json(out / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": placed})
    matrices = {
        tensor.name.removesuffix(_WEIGHT)
        for file in files
        for tensor in file.tensors
        if len(tensor.shape) == 2 and tensor.name.endswith(_WEIGHT)
    }
    ignored = left_out({*matrices, _HEAD}, [name.removesuffix(_WEIGHT) for name in parts])
    config = json.loads((source / CONFIG_FILE).read_bytes())
    eight = {"dynamic": False, "num_bits": 8, "type": "float"}
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "producer": dict(about),
        "config_groups": {
            "group_0": {"input_activations": eight, "weights": eight, "targets": ["Linear"]},
        },
        "ignore": ignored,
    }
    _write_json(out / CONFIG_FILE, config)
    described = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ignored}
    _write_json(out / MODELOPT_FILE, {"producer": dict(about), "quantization": described})


def _copy(source: Path, out: Path) -> None:
    for path in source.iterdir():
        if path.is_dir():
            if path.name not in _LEFT_FOLDERS:
                shutil.copytree(path, out / path.name)
        elif path.name in HEAD_FILES or (path.suffix not in _LEFT and path.name not in _WRITTEN):
            shutil.copy(path, out / path.name)


def _write_file(file: WeightFile, out: Path, parts: Mapping[str, Part]) -> list[str]:
    """Write one weight file, and return the names in it."""
    tensors: dict[str, torch.Tensor] = {}
    stored = opened(file.path)
    for name in stored.keys():  # noqa: SIM118, it is no mapping
        part = parts.get(name)
        if part is None:
            tensors[name] = stored.get_tensor(name)
            continue
        module = name.removesuffix(_WEIGHT)
        tensors[name] = part.values
        tensors[f"{module}.weight_scale"] = part.scale
        tensors[f"{module}.input_scale"] = part.input_scale
    save_file(tensors, out, {"format": "pt"})
    return list(tensors)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
