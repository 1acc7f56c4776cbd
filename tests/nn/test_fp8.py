"""Products in FP8: the weight that is held as it was stored, and their reference, by the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from tessera.nn.forms.choice import fp8
from tessera.nn.forms.plain import PLAIN, Residual
from tessera.nn.fp8 import Fp8Weight, rounded, row_scales, values_of
from tessera.nn.layer import Layer, Linear, Mlp, Stack
from tessera.nn.sequences import Equal
from tests.nn.copying import noise, randomise
from tests.nn.test_attention import spec

# Numbers of e4m3: 4 bits of exponent, biased by 7, and 3 of mantissa; below 2 ** -6 all exponents are alike.
NUMBERS = sorted(
    {
        (8 + mantissa if exponent else mantissa) / 8 * 2.0 ** (max(exponent, 1) - 7)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    }
)


def nearest(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The nearest number of the type to each value over its scale, and the scale again."""
    table = torch.tensor(NUMBERS, dtype=torch.float64)
    over = values.double() / scales.double()
    found = table[(over.abs()[..., None] - table).abs().argmin(-1)]
    return found * over.sign() * scales.double()


@pytest.mark.parametrize("scale", [None, 0.01, 0.002])
def test_rows_are_rounded_to_the_nearest_number(scale: float | None) -> None:
    """The last scale is too small for the largest of them, which become the largest number of the type."""
    rows = noise(7, 48)
    static = None if scale is None else torch.tensor(scale)
    scales = rows.abs().amax(1, keepdim=True) / 448 if static is None else static
    found, expected = rounded(rows, static).double(), nearest(rows, scales)
    # Ties may go either way: both are as near.
    assert ((found - rows).abs() <= (expected - rows).abs() + 1e-6).all()
    assert (found.abs() <= 448.01 * scales).all()


def stored(*shapes: tuple[int, int], seed: int = 0, static: float | None = 0.02) -> Fp8Weight:
    """A weight of several tensors with scales of their own, one below the other."""
    values, scales = [], []
    for number, (rows, inner) in enumerate(shapes):
        weight = noise(rows, inner, seed=seed + number) * (1 + number)
        scale = weight.abs().max() / 448
        values.append(values_of(weight, scale))
        scales.append(scale.expand(rows))
    return Fp8Weight(
        values=torch.cat(values),
        scales=torch.cat(scales),
        input_scale=None if static is None else torch.tensor(static),
    )


@pytest.mark.parametrize("static", [None, 0.02])
def test_a_product_is_that_of_the_rounded_tensors(static: float | None) -> None:
    """Queries, keys and values with scales of their own in one product of ``torch._scaled_mm``."""
    weight, rows = stored((64, 48), (32, 48), (32, 48), static=static), noise(9, 48, seed=5)
    scales = row_scales(rows) if weight.input_scale is None else weight.input_scale.expand(9, 1).contiguous()
    values = values_of(rows, scales)
    bias = noise(128, seed=6).bfloat16()
    found = weight.product(values, scales, bias).double()
    expected = (values.double() * scales) @ (weight.values.double() * weight.scales[:, None]).T + bias
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-6)


def held(layer: Layer, *, static: float | None, without: tuple[str, ...] = ()) -> dict[str, Fp8Weight]:
    """Have the products of a layer hold FP8, but for some; returns what they hold, by name."""
    found = {}
    for name, module in layer.named_modules():
        if isinstance(module, Linear) and not name.endswith(without or ("nothing",)):
            weight = stored(tuple(module.weight.shape), seed=len(name), static=static)
            module.take_fp8(weight.values, weight.scales, weight.input_scale)
            found[name] = weight
    return found


def multiplied(layer: Layer, weights: dict[str, Fp8Weight]) -> None:
    for name, weight in weights.items():
        module = layer.get_submodule(name)
        module.weight = torch.nn.Parameter(weight.multiplied())


GATED: dict[str, Any] = {"norm": "rms", "gated": True, "activation": "silu"}
PLAIN_MLP: dict[str, Any] = {
    "norm": "layer",
    "gated": False,
    "activation": "gelu_pytorch_tanh",
    "kv_heads": 4,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}


@pytest.mark.parametrize("static", [None, 0.02])
@pytest.mark.parametrize("without", [(), ("o_proj",), ("down_proj",), ("qkv_proj", "up_proj")])
@pytest.mark.parametrize("given", [GATED, PLAIN_MLP], ids=["gated", "biased"])
@torch.inference_mode()
def test_a_stack_with_stored_weights_is_that_of_rounded_products(
    given: dict[str, Any], without: tuple[str, ...], static: float | None
) -> None:
    stack, plain = (Stack(spec(**given), 2) for _ in range(2))
    for each in (stack, plain):
        randomise(each, seed=1)
    for layer, other in zip(stack.layers, plain.layers, strict=True):
        multiplied(other, held(layer, static=static, without=without))
        for name, module in other.named_modules():
            if isinstance(module, Linear) and not name.endswith(without or ("nothing",)):
                # Written out: the input is rounded, and the multiplied weight meets it in float32.
                module.forward = lambda rows, own=module: linear(  # type: ignore[method-assign, misc]
                    rounded(rows, None if static is None else torch.tensor(static)), own.weight, own.bias
                )
    stack.prepare(PLAIN)
    results = []
    for each in (stack, plain):
        stream = Residual(noise(6, stack.layers[0].self_attn.o_proj.columns, seed=3))
        if each is plain:
            by_hand(each, stream)
        else:
            each(stream, Equal(3), None)
        results.append(stream.settled())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def by_hand(stack: Stack, stream: Residual) -> None:
    """The layers with products by their own ``forward``, activations and sums by plain torch."""
    for layer in stack.layers:
        attention, mlp = layer.self_attn, layer.mlp
        heads = attention.qkv_proj(layer.input_layernorm(stream))
        q, k, v = attention.split(heads.view(len(heads), -1, attention.head_dim))
        attended = Equal(3).attend(q, k, v, causal=attention.causal)
        stream.rows = stream.rows + attention.o_proj(attended.flatten(1))
        normed = layer.post_attention_layernorm(stream)
        if isinstance(mlp, Mlp):
            inner = torch.nn.functional.gelu(mlp.up_proj(normed), approximate="tanh")
        else:
            gate, up = mlp.gate_up_proj(normed).chunk(2, dim=-1)
            inner = torch.nn.functional.silu(gate) * up
        stream.rows = stream.rows + mlp.down_proj(inner)


def test_each_input_goes_to_the_weight_that_reads_it() -> None:
    layer = Layer(spec(**GATED))
    randomise(layer, seed=0)
    held(layer, static=0.02, without=("o_proj", "down_proj"))
    heads, _, first, last = layer.linears
    stored_heads = heads.fp8
    layer.run_in_fp8(fp8(PLAIN, every=False))
    assert layer.input_layernorm.feeds is stored_heads is not None
    assert layer.post_attention_layernorm.feeds is first.fp8 is not None
    assert first.feeds is None and layer.self_attn.o_proj.fp8 is None
    layer.run_in_fp8(fp8(PLAIN, every=True))
    assert first.feeds is last.fp8 is not None
    assert heads.fp8 is stored_heads, "held as it was stored"


def test_padding_keeps_what_is_there() -> None:
    weight = stored((40, 48))
    wide = weight.padded(columns=8, inner=16)
    assert wide.values.shape == (48, 64) and wide.input_scale is weight.input_scale
    whole = wide.multiplied()
    assert torch.equal(whole[:40, :48], weight.multiplied()) and int(whole.count_nonzero()) == int(
        weight.multiplied().count_nonzero()
    )
    module = Mlp(spec(**PLAIN_MLP))
    randomise(module, seed=0)
    before = module.up_proj.columns
    up = stored((before, 48), seed=3)
    module.up_proj.take_fp8(up.values, up.scales, None)
    module.pad()
    assert module.up_proj.fp8 is not None and module.up_proj.bias is not None
    wanted = -(-before // 128) * 128
    assert (
        len(module.up_proj.fp8.values)
        == len(module.up_proj.bias)
        == module.down_proj.weight.shape[1]
        == wanted
    )
