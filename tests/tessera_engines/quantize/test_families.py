"""``tessera engine quantize`` of every family: its own prompts, modules and names of tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tessera.checkpoint.loading import as_stored
from tessera.models import open_model
from tessera_engines.cli import main
from tessera_engines.quantize.checkpoint import excludes
from tessera_tools.random_checkpoint.checkpoint import families, write_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    (folder / "texts.txt").write_text("two cats on a sofa\nan invoice of March\n")
    Image.linear_gradient("L").convert("RGB").resize((64, 48)).save(folder / "grey.png")
    return folder


@pytest.mark.parametrize("family", sorted(families()))
def test_every_family_is_written_as_readers_of_the_layout_take_it(
    family: str, source: Path, tmp_path: Path
) -> None:
    """Every matrix is in FP8 with both scales, or one of the entries leaves it out, and never both."""
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    write_checkpoint(checkpoint, families()[family].load().tiny)
    words = ["--model-path", str(checkpoint), "--calibration", str(source), "--out", str(out)]
    main(["quantize", *words, "--most-loss", "1000"])
    with safe_open(out / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        eight = {name for name, value in tensors.items() if value.get_dtype() == "F8_E4M3"}
        matrices = {
            n for n, value in tensors.items() if len(value.get_shape()) == 2 and n.endswith(".weight")
        }
    modules = {name.removesuffix(".weight") for name in eight}
    scales = {f"{name}.{end}_scale" for name in modules for end in ("weight", "input")}
    assert modules and scales <= tensors.keys()
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    for name in matrices:
        module = name.removesuffix(".weight")
        assert any(excludes(entry, module) for entry in ignored) == (name not in eight), name
    with as_stored():
        text = open_model(out).load_text(dtype="float32", device="cpu")
    held = [module for module in text.modules() if getattr(module, "fp8", None) is not None]  # type: ignore[attr-defined]
    assert held and all(module.fp8.values.dtype == torch.float8_e4m3fn for module in held)
