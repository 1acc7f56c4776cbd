"""Layers, their MLPs, and a stack of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn.functional import pad

from tessera.nn.attention import Attention
from tessera.nn.blocks import Block, LayerNorm, Linear, Norm, norm, use
from tessera.nn.forms.plain import Form, Residual
from tessera.nn.rotary import Rotation
from tessera.nn.sequences import Sequences
from tessera.nn.spec import LayerSpec
from tessera.nn.vision import PatchEmbedding

if TYPE_CHECKING:
    from tessera.nn.forms.plain import Rows

# Products whose width is a multiple of this run at full rate. At 32 tiles on an H100 the two products of
# SigLIP's MLP take 1.01 ms with 4352 columns and 1.04 ms with 4304. Its heads are left as they are: 72 padded
# to 80 makes attention 0.03 ms faster and the products around it 0.06 ms slower.
_MULTIPLE = 128


class Mlp(Block):
    """``down(activation(up(x)))``."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.up_proj = Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.intermediate, spec.hidden, bias=spec.mlp_bias)

    def forward(self, normed: Rows, stream: Residual) -> None:
        """Add the network of ``normed`` ``[tokens, hidden]`` to the stream."""
        self.down_proj.add_to(stream, self.form.activated(self.up_proj, normed, self.activation))

    def pad(self) -> None:
        """Pad the inner width with zeros, which every activation maps to zero, for products at full rate."""
        up, down = self.up_proj, self.down_proj
        missing = -up.weight.shape[0] % _MULTIPLE
        up.weight = _padded(up.weight, (0, 0, 0, missing))
        down.weight = _padded(down.weight, (0, missing))
        if up.bias is not None:
            up.bias = _padded(up.bias, (0, missing))


class GatedMlp(Block):
    """``down(activation(gate(x)) * up(x))`` with gate and up from one product, in this order."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate_up_proj = Linear(spec.hidden, 2 * spec.intermediate, bias=spec.mlp_bias)
        self.down_proj = Linear(spec.intermediate, spec.hidden, bias=spec.mlp_bias)

    def forward(self, normed: Rows, stream: Residual) -> None:
        """Add the network of ``normed`` ``[tokens, hidden]`` to the stream."""
        self.down_proj.add_to(stream, self.form.gated(self.gate_up_proj, normed, self.activation))


def _padded(weight: torch.Tensor, padding: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(pad(weight, padding), requires_grad=False)


class Layer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.input_layernorm = norm(spec.norm, spec.hidden, eps=spec.eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = norm(spec.norm, spec.hidden, eps=spec.eps)
        self.mlp = GatedMlp(spec) if spec.gated else Mlp(spec)

    def forward(self, stream: Residual, sequences: Sequences, rotation: Rotation | None) -> None:
        self.self_attn(self.input_layernorm(stream), stream, sequences, rotation)
        self.mlp(self.post_attention_layernorm(stream), stream)


class Stack(nn.ModuleList):
    """The layers of a tower, by their numbers."""

    def __init__(self, spec: LayerSpec, layers: int) -> None:
        super().__init__(Layer(spec) for _ in range(layers))
        self.offsets: torch.Tensor | None  # float32 [layers, hidden]
        self.register_buffer("offsets", None, persistent=False)

    @property
    def layers(self) -> list[Layer]:
        return cast(list[Layer], list(self))

    def forward(
        self,
        stream: Residual,
        sequences: Sequences,
        rotation: Rotation | None,
        after: Callable[[int, Residual], None] | None = None,
    ) -> None:
        """Run the layers over the stream; ``after`` is called behind each with its number, from 0."""
        for number, layer in enumerate(self.layers):
            layer(stream, sequences, rotation)
            if after is not None:
                after(number, stream)

    def output(self, stream: Residual, number: int) -> torch.Tensor:
        """The rows behind layer ``number``, complete; to be read before the next layer runs."""
        rows = stream.settled()
        return rows if self.offsets is None else rows + self.offsets[number].to(rows.dtype)

    def prepare(self, form: Form, *, start: PatchEmbedding | None = None, final: Norm | None = None) -> None:
        """Run in ``form``, ``start`` and ``final`` as well; call it when the weights are in place.

        ``start`` begins the stream, ``final`` the norm behind the last layer. The biases
        of products that add to the stream are the same for every row. A form that adds in place leaves them
        out, and their running sums are added by the norms, which read the stream anyway.
        """
        blocks = [*self.layers, *(block for block in (start, final) if block is not None)]
        for block in blocks:
            use(block, form)
        adding: list[Linear | None] = [None if start is None else start.projection]
        norms: list[Norm] = []
        for layer in self.layers:
            adding += [layer.self_attn.o_proj, layer.mlp.down_proj]
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
        deferred = [
            product
            for product in adding
            if product is not None and product.bias is not None and form.defers(product)
        ]
        if not deferred or not norms or not all(isinstance(one, LayerNorm) for one in norms):
            return
        total: torch.Tensor | None = None
        sums = []
        for product in adding:
            if product in deferred and product is not None and product.bias is not None:
                product.deferred = True
                bias = product.bias.float()
                total = bias if total is None else total + bias
            sums.append(total)
        for one, offset in zip([*norms, final], sums, strict=True):
            if isinstance(one, LayerNorm):
                one.offset = offset
        self.offsets = torch.stack([offset for offset in sums[2::2] if offset is not None])

    def quantise(self, form: Form, *, keep: int) -> None:
        """Run in ``form`` but for ``keep`` layers at each end."""
        for layer in self.layers[keep : len(self) - keep]:
            use(layer, form)
