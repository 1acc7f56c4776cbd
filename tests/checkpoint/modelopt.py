"""A checkpoint in the full layout of NVIDIA's ModelOpt, made of another one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PROJECTIONS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def quantise(
    source: Path,
    out: Path,
    *,
    static: bool,
    without: Sequence[str] = (),
    exclude: Sequence[str] = ("lm_head", "vision_model*", "mlp1*"),
) -> Path:
    """Write the backbone's projections in FP8, each with a scale of its own, but for some parts of names.

    By both declarations, as its exporter leaves them. Inputs of ``static`` scales are below 8.
    """
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    written = dict(tensors)
    for name, weight in tensors.items():
        if not name.endswith(PROJECTIONS) or "vision" in name or any(part in name for part in without):
            continue
        scale = weight.float().abs().amax() / 448
        written[name] = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        written[f"{name}_scale"] = scale
        if static:
            written[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(
                8 / 448 * (1 + len(name) / 1000)
            )
    save_file(written, out / "model.safetensors", {"format": "pt"})
    producer = {"name": "modelopt", "version": "0.39.0"}
    eight = {"dynamic": False, "num_bits": 8, "type": "float"}
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "config_groups": {"group_0": {"input_activations": eight, "weights": eight, "targets": ["Linear"]}},
        "ignore": list(exclude),
        "quant_algo": "FP8",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": producer,
        "quant_method": "modelopt",
    }
    (out / "config.json").write_text(json.dumps(config))
    about = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": list(exclude)}
    described = {"producer": producer, "quantization": about}
    (out / "hf_quant_config.json").write_text(json.dumps(described))
    return out
