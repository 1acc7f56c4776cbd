"""What is done behind pooling, against the modules of ``sentence-transformers`` from the same files."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tessera.checkpoint.declared import TORCH_ACTIVATIONS, TRANSFORMERS_ACTIVATIONS, read_declared
from tessera.nn.steps import DenseStep
from tests.models.declaring import dense, write

pytestmark = pytest.mark.parity

INNER, WIDTH = 24, 16

# What has tensors or needs arguments, and what is no function of each number alone.
NOT_DONE = {
    *("MultiheadAttention", "PReLU", "Threshold", "ClippedGELUActivation", "XIELUActivation"),
    *("GLU", "LogSoftmax", "Softmax", "Softmax2d", "Softmin"),
}


def paths() -> list[str]:
    torchs = ["torch.nn.modules.linear.Identity"]
    torchs += [
        f"torch.nn.modules.activation.{name}" for name in sorted(TORCH_ACTIVATIONS) if name != "Identity"
    ]
    return torchs + [f"transformers.activations.{name}" for name in sorted(TRANSFORMERS_ACTIVATIONS)]


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers 6.2")
@pytest.mark.parametrize("activation", paths())
def test_a_product_is_that_of_sentence_transformers(activation: str, tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Dense

    module = dense(INNER, WIDTH, activation_function=activation)
    entries = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    entries += [
        {"path": name, "type": f"sentence_transformers.models.{name}"} for name in ("Pooling", "Dense")
    ]
    write(tmp_path / "modules.json", entries)
    write(tmp_path / "Pooling" / "config.json", {})
    write(tmp_path / "Dense" / "config.json", module.config)
    save_file(dict(module.tensors), tmp_path / "Dense" / "model.safetensors")
    (step,) = read_declared(tmp_path).dense
    own = DenseStep(step)
    own.load_state_dict(load_file(tmp_path / "Dense" / "model.safetensors"))
    reference = Dense.load(str(tmp_path / "Dense"), trust_remote_code=True).eval()
    # Wide enough for both sides of every threshold.
    rows = 4 * torch.randn(64, INNER, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = reference({"sentence_embedding": rows})["sentence_embedding"]
        torch.testing.assert_close(own(rows), expected, rtol=1e-6, atol=1e-6)


def test_every_activation_of_each_number_is_read() -> None:
    from transformers import activations

    own = {
        name
        for name, found in inspect.getmembers(activations, inspect.isclass)
        if found.__module__ == activations.__name__ and issubclass(found, nn.Module)
    }
    known = {*TORCH_ACTIVATIONS, *TRANSFORMERS_ACTIVATIONS}
    assert {*nn.modules.activation.__all__, *own} - known == NOT_DONE
