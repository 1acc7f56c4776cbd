"""Checkpoints with files beside them that declare what their vectors are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_PACKAGE = "sentence_transformers.models."


@dataclass(frozen=True)
class Module:
    """An entry of ``modules.json``: the class, the file of its folder, and its tensors."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def dense(inner: int, width: int, *, seed: int = 0, **config: Any) -> Module:
    """A product of random weights; with a bias unless ``config`` has another value."""
    random = torch.Generator().manual_seed(seed)
    tensors = {"linear.weight": torch.randn(width, inner, generator=random) / inner**0.5}
    if config.get("bias", True):
        tensors["linear.bias"] = torch.randn(width, generator=random) * 0.1
    if config.get("use_residual") and inner != width:
        tensors["residual.weight"] = torch.randn(width, inner, generator=random) / inner**0.5
    return Module("Dense", {"in_features": inner, "out_features": width, **config}, tensors)


def layer_norm(width: int) -> Module:
    random = torch.Generator().manual_seed(3)
    tensors = {
        "norm.weight": 1 + torch.randn(width, generator=random) * 0.3,
        "norm.bias": torch.randn(width, generator=random) * 0.3,
    }
    return Module("LayerNorm", {"dimension": width}, tensors)


def declare(
    source: Path, target: Path, *modules: Module, config: Mapping[str, Any] = {}, **files: Mapping[str, Any]
) -> Path:
    """A copy of a checkpoint with these modules behind its transformer, or with its own.

    ``config`` replaces keys of ``config.json``; ``files`` are JSON files by their names without the ending.
    """
    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).symlink_to(path)
        elif not modules:
            shutil.copytree(path, target / path.name)
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{_PACKAGE}Transformer"}]
    for place, module in enumerate(modules, 1):
        folder = f"{place}_{module.name}"
        entry = {"idx": place, "name": str(place), "path": folder, "type": _PACKAGE + module.name}
        entries.append(entry)
        if module.config:
            write(target / folder / "config.json", module.config)
        if module.tensors:
            save_file(dict(module.tensors), target / folder / "model.safetensors")
    if modules:
        write(target / "modules.json", entries)
    if config:
        write(target / "config.json", {**json.loads((source / "config.json").read_text()), **config})
    for name, content in files.items():
        write(target / f"{name}.json", content)
    return target


def nest(path: Path, folder: str = "0_Transformer") -> Path:
    """Move the transformer of a checkpoint with ``modules.json`` into a folder of its own."""
    (path / folder).mkdir()
    for file in list(path.iterdir()):
        if file.is_file() and file.name not in ("modules.json", "config_sentence_transformers.json"):
            file.rename(path / folder / file.name)
    first, *others = json.loads((path / "modules.json").read_text())
    write(path / "modules.json", [first | {"path": folder}, *others])
    return path


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(content))
