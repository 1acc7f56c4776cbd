"""The residual stream, and every operation on it by plain torch, for any device and type.

The other forms replace what they do otherwise. Nothing here is done in place but what is pending, so that
gradients can be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from tessera.nn import sequences
from tessera.nn.rotary import Rotation, rotate

if TYPE_CHECKING:
    from tessera.nn.layer import Attention, Block, LayerNorm, Linear, RmsNorm
    from tessera.nn.spec import LayerSpec
    from tessera.nn.vision import PatchEmbedding

GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")
"""The names of GELU's tanh form."""

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_BY_NAME: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


def activation_function(name: str) -> Activation:
    """The function called ``name``; the configuration reader has refused unknown names."""
    return _BY_NAME[name]


class Residual:
    """The rows ``[tokens, width]`` that every block reads and adds to.

    ``pending``, in the rows' shape, is what is to be added before the next block reads them: an FP8 product
    cannot add to its output, and the norm that follows reads both anyway.
    """

    __slots__ = ("pending", "rows")

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.pending: torch.Tensor | None = None

    def settled(self) -> torch.Tensor:
        """The rows with nothing pending."""
        if self.pending is not None:
            self.rows.add_(self.pending)
            self.pending = None
        return self.rows


Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""``[tokens, width]``, or the same in FP8 with a scale for each row."""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, each ``[tokens, heads, head_dim]``."""


class Form:
    """The operations that blocks are made of."""

    def require(self, spec: LayerSpec) -> None:
        """Raises ``ConfigError`` naming what of such layers this form cannot run."""

    def prepare(self, block: Block) -> None:
        """Lay the weights of ``block`` out for this form; they are in place."""

    def defers(self, linear: Linear) -> bool:
        """Whether the bias of a product that adds to the stream may be left to the norms."""
        return False

    def rms_norm(self, stream: Residual, norm: RmsNorm) -> Rows:
        return functional.rms_norm(stream.settled(), norm.weight.shape, norm.weight, norm.eps)

    def layer_norm(self, stream: Residual, norm: LayerNorm) -> Rows:
        rows = stream.settled()
        return functional.layer_norm(rows, norm.weight.shape, norm.weight, norm.bias, norm.eps)

    def product(self, linear: Linear, rows: Rows) -> torch.Tensor:
        return functional.linear(tensor(rows), linear.weight, linear.bias)

    def activated(self, linear: Linear, rows: Rows, activation: str) -> Rows:
        """The activation of the product."""
        return activation_function(activation)(self.product(linear, rows))

    def gated(self, linear: Linear, rows: Rows, activation: str) -> Rows:
        """The product holds the gate, then as many columns that the activation of the gate multiplies."""
        gate, up = self.product(linear, rows).chunk(2, dim=-1)
        return activation_function(activation)(gate) * up

    def add_product(self, stream: Residual, linear: Linear, rows: Rows) -> None:
        self.add(stream, self.product(linear, rows))

    def add(self, stream: Residual, rows: torch.Tensor) -> None:
        stream.rows = stream.rows + rows

    def add_weighted(
        self, stream: Residual, table: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Add ``sum(weights[tap] * table[index[tap]])``, summed in float32.

        ``table`` is ``[rows, width]``, ``index`` int32 and ``weights`` float32, both ``[taps, tokens]``.
        """
        found = stream.rows.float()
        for at, weight in zip(index, weights, strict=True):
            found = found + weight[:, None] * table.index_select(0, at).float()
        stream.rows = found.to(stream.rows.dtype)

    def rotated(self, heads: torch.Tensor, attention: Attention, rotation: Rotation | None) -> Heads:
        """Queries and keys behind their norms and rotation, and values.

        ``heads`` ``[tokens, heads + 2 * kv_heads, head_dim]`` may be overwritten.
        """
        if attention.q_norm is not None and attention.k_norm is not None:
            return self._normed(heads, attention, attention.q_norm, attention.k_norm, rotation)
        if rotation is None:
            return attention.split(heads)
        # Side by side as they lie in the product: one pass over both.
        both = rotate(heads[:, : -attention.kv_heads], rotation.cosines, rotation.sines)
        q, k = both[:, : attention.heads], both[:, attention.heads :]
        return rotation.scaled(q), k, heads[:, -attention.kv_heads :]

    def _normed(
        self,
        heads: torch.Tensor,
        attention: Attention,
        q_norm: RmsNorm,
        k_norm: RmsNorm,
        rotation: Rotation | None,
    ) -> Heads:
        q, k, v = attention.split(heads)
        q, k = (
            functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
            for x, norm in ((q, q_norm), (k, k_norm))
        )
        if rotation is None:
            return q, k, v
        q, k = (rotate(x, rotation.cosines, rotation.sines) for x in (q, k))
        return rotation.scaled(q), k, v

    def packed(self, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> sequences.Sequences:
        """Sequences end to end, as ``sequences.Packed`` says."""
        return sequences.Packed(cu_seqlens, lengths)

    def keyed(
        self, cu_seqlens: torch.Tensor, lengths: Sequence[int], keys: torch.Tensor
    ) -> sequences.Sequences:
        """Sequences end to end, as ``sequences.Keyed`` says."""
        return sequences.Keyed(cu_seqlens, lengths, keys)

    def equal(self, length: int) -> sequences.Sequences:
        """Sequences end to end that are all of one length."""
        return sequences.Equal(length)

    def patches(self, pixels: torch.Tensor, embedding: PatchEmbedding) -> torch.Tensor:
        """``[patches, features]`` in the weight's type, of what ``PatchEmbedding`` takes."""
        rows = embedding.cut(pixels) if pixels.dim() == 4 else pixels
        if rows.dtype == torch.uint8:
            rows = (rows.to(torch.float32) / 255.0 - embedding.mean) / embedding.std
        return rows.to(embedding.projection.weight.dtype)


PLAIN = Form()


def tensor(rows: Rows) -> torch.Tensor:
    """Rows that are known not to be in FP8."""
    return cast(torch.Tensor, rows)
