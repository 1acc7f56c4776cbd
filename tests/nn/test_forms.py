"""Forms that add in place and leave biases to the norms compute what plain torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, linear

from tessera.nn.forms.exported import Exported
from tessera.nn.forms.plain import PLAIN, Form, Residual, Rows, tensor
from tessera.nn.kernels import exported_products, gemm
from tessera.nn.layer import LayerNorm, Linear, Stack, norm
from tessera.nn.sequences import Equal, Sequences
from tessera.nn.vision import PatchEmbedding
from tests.nn.copying import noise, randomise
from tests.nn.test_attention import CPU, spec

LAYERS = 3


class InPlace(Form):
    """As the fused form: products add in place, and what they lack is added as the stream is read."""

    def defers(self, linear: Linear) -> bool:
        return True

    def layer_norm(self, stream: Residual, norm: LayerNorm) -> Rows:
        rows = stream.settled()
        given = rows if norm.offset is None else rows + norm.offset
        return layer_norm(given, norm.weight.shape, norm.weight, norm.bias, norm.eps)

    def add_product(self, stream: Residual, linear: Linear, rows: Rows) -> None:
        stream.rows.addmm_(tensor(rows), linear.weight.t())
        if linear.bias is not None and not linear.deferred:
            stream.rows.add_(linear.bias)


class Pending(InPlace):
    """As FP8: what is to be added waits for the next norm."""

    def add_product(self, stream: Residual, product: Linear, rows: Rows) -> None:
        assert stream.pending is None
        bias = None if product.deferred else product.bias
        stream.pending = linear(tensor(rows), product.weight, bias)


class OnCpu(Exported):
    """The form of programs for Hopper with torch's attention."""

    def equal(self, length: int) -> Sequences:
        return Equal(length)


def tower(kind: Any, final: bool) -> tuple[PatchEmbedding, Stack, Any]:
    biased: dict[str, Any] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    layer = spec(norm=kind, gated=False, activation="gelu", kv_heads=4, **biased)
    start = PatchEmbedding(48, 4, bias=True)
    stack = Stack(layer, LAYERS)
    last = norm(kind, 48, eps=1e-6) if final else None
    for number, module in enumerate((start, stack, last)):
        if module is not None:
            randomise(module, seed=number)
    start.place_constants((0.5,) * 3, (0.5,) * 3, CPU)
    return start, stack, last


def run(start: PatchEmbedding, stack: Stack, last: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The end of the tower, and the rows behind each layer."""
    seen: list[torch.Tensor] = []
    stream = start(noise(6, 48), noise(6, 48, seed=9))
    stack(stream, Equal(3), None, lambda number, rows: seen.append(stack.output(rows, number).clone()))
    end = stack.output(stream, LAYERS - 1) if last is None else last(stream)
    return end, seen


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("form", ["in place", "pending", "exported"])
@torch.inference_mode()
def test_the_same_rows_in_every_form(
    form: str, kind: str, final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, behind = run(*tower(kind, final))
    start, stack, last = tower(kind, final)
    if form == "exported":
        monkeypatch.setattr(gemm, "serves", lambda _: True)
        monkeypatch.setattr(exported_products, "offset_layer_norm", _offset_layer_norm)
        stack.prepare(OnCpu(8), start=start, final=last)
    else:
        stack.prepare(InPlace(), start=start, final=last)
    deferred = [layer.self_attn.o_proj.deferred for layer in stack.layers]
    assert deferred == [kind == "layer"] * LAYERS
    if form == "pending":
        for layer in stack.layers[1:-1]:
            layer.run_in_fp8(Pending())
        forms = [type(layer.mlp.form) for layer in stack.layers]
        assert forms == [InPlace, Pending, InPlace]
    found, seen = run(start, stack, last)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(seen, behind, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def _offset_layer_norm(
    rows: torch.Tensor, offset: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    return layer_norm(rows + offset, weight.shape, weight, bias, eps)


def test_plain_torch_until_said_otherwise() -> None:
    start, stack, _ = tower("layer", final=False)
    assert start.form is PLAIN and all(layer.self_attn.form is PLAIN for layer in stack.layers)


def test_gradients_reach_every_weight() -> None:
    start, stack, last = tower("layer", final=True)
    run(start, stack, last)[0].sum().backward()
    for module in (start, stack, last):
        for name, value in module.named_parameters():
            assert value.grad is not None and bool(value.grad.isfinite().all()), name
