"""The MLP of a layer, with a gate or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.nn.block import Block
from tessera.nn.linear import Linear
from tessera.nn.residual import Residual
from tessera.nn.spec import LayerSpec

if TYPE_CHECKING:
    from tessera.nn.forms.plain import Rows


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
