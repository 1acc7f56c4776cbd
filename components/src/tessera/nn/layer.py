"""Layers and a stack of them; what they are made of: products, norms, attention and MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, cast

import torch
from torch import nn
from torch.nn.functional import pad

from tessera.checkpoint.safetensors import StoredTensor
from tessera.nn.forms.choice import fp8
from tessera.nn.forms.plain import PLAIN, Form, Residual, tensor
from tessera.nn.fp8 import Fp8Weight
from tessera.nn.rotary import Rotation
from tessera.nn.sequences import Sequences
from tessera.nn.spec import LayerSpec

if TYPE_CHECKING:
    from tessera.nn.forms.plain import Rows
    from tessera.nn.vision import PatchEmbedding

# Products whose width is a multiple of this run at full rate. At 32 tiles on an H100 the two products of
# SigLIP's MLP take 1.01 ms with 4352 columns and 1.04 ms with 4304. Its heads are left as they are: 72 padded
# to 80 makes attention 0.03 ms faster and the products around it 0.06 ms slower.
_MULTIPLE = 128


SOURCES: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What is stored apart and is one product here."""


class Block(nn.Module):
    """A module whose operations are those of its form; plain torch until ``use`` says otherwise."""

    form: Form = PLAIN


def use(module: nn.Module, form: Form) -> None:
    """Have ``module`` and every block below it run in ``form``; call it when their weights are in place."""
    for block in module.modules():
        if isinstance(block, Block):
            block.form = form
            form.prepare(block)


class Linear(Block):
    """``rows @ weight.T + bias``, given as it is or added to the residual stream.

    ``deferred`` says that ``add_to`` leaves the bias out, because the norms that read the stream add it.
    ``float_bias`` and ``fp8`` are the bias and the weight as some forms take them. ``feeds`` is the weight in
    FP8 that reads what follows the product. ``stored`` are the tensors that the weight was loaded from.
    """

    def __init__(self, inner: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.columns = columns
        self.weight = nn.Parameter(torch.empty(columns, inner))
        self.bias = nn.Parameter(torch.empty(columns)) if bias else None
        self.deferred = False
        self.float_bias: torch.Tensor | None = None
        self.fp8: Fp8Weight | None = None
        self.feeds: Fp8Weight | None = None
        self.holds_fp8 = False
        self.stored: tuple[StoredTensor, ...] = ()

    def forward(self, rows: Rows) -> torch.Tensor:
        """``[tokens, inner]`` to ``[tokens, columns]``."""
        return self.form.product(self, rows)

    def add_to(self, stream: Residual, rows: Rows) -> None:
        """Add the product of ``[tokens, inner]`` to the stream."""
        self.form.add_product(stream, self, rows)

    def takes_fp8(self, columns: int, inner: int) -> bool:
        """Whether it holds a weight of this shape in FP8: the products of layers do."""
        return self.holds_fp8 and Fp8Weight.fits(columns, inner)

    def take_fp8(self, values: torch.Tensor, scales: torch.Tensor, input_scale: torch.Tensor | None) -> None:
        """Hold a weight as it was stored, with the scales that ``Fp8Weight`` has."""
        self.hold(Fp8Weight(values=values, scales=scales, input_scale=input_scale))

    def hold(self, weight: Fp8Weight) -> None:
        """Have ``weight`` in place of the module's own."""
        self.fp8 = weight
        own = self.weight
        self.weight = nn.Parameter(torch.empty(0, dtype=own.dtype, device=weight.values.device), False)

    def pad(self, *, columns: int = 0, inner: int = 0) -> None:
        """Lay so many zeros behind the columns and along the inner width."""
        if self.fp8 is not None:
            self.fp8 = self.fp8.padded(columns=columns, inner=inner)
        else:
            self.weight = nn.Parameter(pad(self.weight, (0, inner, 0, columns)), requires_grad=False)
        if self.bias is not None and columns:
            self.bias = nn.Parameter(pad(self.bias, (0, columns)), requires_grad=False)


class RmsNorm(Block):
    """``x / sqrt(mean(x²) + eps) * weight``, computed in float32 whatever the rows' type.

    ``feeds`` is the weight in FP8 that reads the rows, if one does.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.feeds: Fp8Weight | None = None
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, stream: Residual) -> Rows:
        """``[tokens, width]`` in the stream's type, or as a product in FP8 takes it."""
        return self.form.rms_norm(stream, self)


class LayerNorm(Block):
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, computed in float32 whatever the rows' type.

    ``offset``, float32 ``[width]``, is what the stream lacks: biases of products, the same for every row.
    With ``renews`` the stream goes on from what the norm gives. ``feeds`` is the weight in FP8 that reads the
    rows, if one does.
    """

    def __init__(self, width: int, *, eps: float, renews: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.renews = renews
        self.feeds: Fp8Weight | None = None
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.offset: torch.Tensor | None
        self.register_buffer("offset", None, persistent=False)

    def forward(self, stream: Residual) -> Rows:
        """``[tokens, width]`` in the stream's type, or as a product in FP8 takes it."""
        rows = self.form.layer_norm(stream, self)
        if self.renews:
            stream.rows = tensor(rows)
        return rows


Norm = RmsNorm | LayerNorm


def norm(kind: Literal["rms", "layer"], width: int, *, eps: float, renews: bool = False) -> Norm:
    """The norm of that name; ``renews`` is LayerNorm's."""
    return RmsNorm(width, eps=eps) if kind == "rms" else LayerNorm(width, eps=eps, renews=renews)


class Attention(Block):
    """Attention within each sequence, with q, k and v from one product, in this order.

    Queries and keys go through a norm of their own if the spec has one, and are rotated if there is a
    rotation. Scores are scaled by ``head_dim ** -0.5``.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.causal = spec.causal
        self.qkv_proj = Linear(spec.hidden, spec.qkv_width, bias=spec.qkv_bias)
        self.q_norm = RmsNorm(spec.head_dim, eps=spec.eps) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, eps=spec.eps) if spec.qk_norm else None
        self.o_proj = Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.out_bias)

    def forward(
        self, normed: Rows, stream: Residual, sequences: Sequences, rotation: Rotation | None
    ) -> None:
        """Add the attention of ``normed`` ``[tokens, hidden]`` to the stream."""
        qkv = self.qkv_proj(normed)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = self.form.rotated(heads, self, rotation)
        attended = sequences.attend(q, k, v, causal=self.causal)
        self.o_proj.add_to(stream, attended.flatten(1))

    def split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values in ``[tokens, heads + 2 * kv_heads, head_dim]``."""
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v


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
        missing = -self.up_proj.columns % _MULTIPLE
        self.up_proj.pad(columns=missing)
        self.down_proj.pad(inner=missing)


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


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.input_layernorm = norm(spec.norm, spec.hidden, eps=spec.eps, renews=spec.post_norm)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = norm(spec.norm, spec.hidden, eps=spec.eps, renews=spec.post_norm)
        self.mlp = GatedMlp(spec) if spec.gated else Mlp(spec)
        for linear in self.linears:
            linear.holds_fp8 = True

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The products: of queries, keys and values, behind attention, into the MLP, and out of it."""
        mlp = self.mlp
        first = mlp.gate_up_proj if isinstance(mlp, GatedMlp) else mlp.up_proj
        return self.self_attn.qkv_proj, self.self_attn.o_proj, first, mlp.down_proj

    def run_in_fp8(self, form: Form) -> None:
        """Run in ``form``, whose weights in FP8 get their inputs from what is before them."""
        use(self, form)
        heads, _, first, last = self.linears
        self.input_layernorm.feeds = heads.fp8
        self.post_attention_layernorm.feeds = first.fp8
        first.feeds = last.fp8

    def forward(self, stream: Residual, sequences: Sequences, rotation: Rotation | None) -> None:
        self.self_attn(self.input_layernorm(stream), stream, sequences, rotation)
        self.mlp(self.post_attention_layernorm(stream), stream)


class Tower(nn.Module):
    """A module with a stack of layers."""

    form: Form = PLAIN

    @property
    def stack(self) -> Stack:
        """The layers, whose products are those that can run in FP8."""
        return next(found for found in self.modules() if isinstance(found, Stack))

    def quantise(self, *, keep: int) -> None:
        """Hold the layers' products in FP8, but for ``keep`` layers at each end and what is around them."""
        self.stack.quantise(keep=keep)


class Stack(nn.ModuleList):
    """The layers of a tower, by their numbers."""

    def __init__(self, spec: LayerSpec, layers: int) -> None:
        super().__init__(Layer(spec) for _ in range(layers))
        self.form: Form = PLAIN
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
        out, and their running sums are added by the norms, which read the stream anyway. Behind a norm that
        renews the stream they begin anew.
        """
        self.form = form
        blocks = [*self.layers, *(block for block in (start, final) if block is not None)]
        for block in blocks:
            use(block, form)
        for layer in self.layers:
            if any(linear.fp8 is not None for linear in layer.linears):
                layer.run_in_fp8(fp8(form, every=False))
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
        for product, reader in zip(adding, [*norms, final], strict=True):
            if product in deferred and product is not None and product.bias is not None:
                product.deferred = True
                bias = product.bias.float()
                total = bias if total is None else total + bias
            sums.append(total)
            if isinstance(reader, LayerNorm) and reader.renews:
                total = None
        for one, offset in zip([*norms, final], sums, strict=True):
            if isinstance(one, LayerNorm) and offset is not None:
                one.offset = offset
        self.offsets = torch.stack([offset for offset in sums[2::2] if offset is not None])

    def quantise(self, *, keep: int) -> None:
        """Have every product in FP8, but for those of ``keep`` layers at each end that are not yet."""
        for layer in self.layers[keep : len(self) - keep]:
            layer.run_in_fp8(fp8(self.form, every=True))
