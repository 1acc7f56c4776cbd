"""Adapters beside the weights that they change, and the weights that come of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.models.declaring import write

Tensors = dict[str, np.ndarray]
WRAPPER = "base_model.model."


def config(**changes: Any) -> dict[str, Any]:
    """What PEFT writes of an adapter, with the keys that have no effect."""
    return {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": None,
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "loftq_config": {},
        "megatron_core": "megatron.core",
        "runtime_config": {"ephemeral_gpu_offload": False},
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["query", "value"],
        **changes,
    }


def low_rank(module: str, columns: int, inner: int, *, rank: int = 4, seed: int = 0) -> Tensors:
    """The two products of an adapter of a module, by their names in its file."""
    random = np.random.default_rng(seed)
    return {
        f"{WRAPPER}{module}.lora_A.weight": random.normal(size=(rank, inner)).astype(np.float32) / inner**0.5,
        f"{WRAPPER}{module}.lora_B.weight": random.normal(size=(columns, rank)).astype(np.float32) * 0.3,
    }


def adapt(source: Path, target: Path, tensors: Tensors, **changes: Any) -> Path:
    """Link a checkpoint's files, with an adapter beside them."""
    linked(source, target)
    write(target / "adapter_config.json", config(**changes))
    save_file(tensors, target / "adapter_model.safetensors", {"format": "pt"})
    return target


def linked(source: Path, target: Path, *, without: str = "") -> Path:
    for path in source.rglob("*"):
        if path.is_file() and path.name != without:
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return target


def changed(source: Path, target: Path, change: Callable[[Tensors], Mapping[str, np.ndarray]]) -> Path:
    """Link a checkpoint's files, with other weights by what ``change`` makes of the stored ones."""
    linked(source, target, without="model.safetensors")
    stored = load_file(source / "model.safetensors")
    weights = {name: np.ascontiguousarray(value) for name, value in (stored | change(stored)).items()}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target
