"""Networks described without saying for which compiler.

A family's ``describe_network`` writes one stage of its forward pass against ``Graph``, which is implemented
with a compiler's network API. Every tensor has one declared type, and nothing is
converted unless ``cast`` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis whose size the batch decides: ``plus`` more than there are units, sequences, tokens or rows."""

    name: str
    plus: int = 0


UNITS, SEQUENCES, TOKENS, ROWS = Axis("units"), Axis("sequences"), Axis("tokens"), Axis("rows")
BOUNDS = Axis("sequences", plus=1)


@dataclass(frozen=True, slots=True)
class Node:
    """A tensor of the network.

    ``handle`` is the compiler's own; ``dtype`` is float8 to float32, bfloat16, int32, int64, uint8 or bool.
    """

    handle: Any
    dtype: str
    rank: int


class Graph(Protocol):
    """The operations that the families' networks are made of.

    Operands of one operation have one type; their shapes broadcast as numpy's do, and a number stands for a
    constant of the other operand's type.
    """

    def input(self, name: str, dtype: str, shape: Sequence[int | Axis]) -> Node: ...

    def output(self, name: str, node: Node) -> None: ...

    def within(self, name: str) -> AbstractContextManager[None]:
        """What is described inside is part of ``name`` in everything that is said about the network."""
        ...

    def constant(self, value: torch.Tensor) -> Node: ...

    def cast(self, node: Node, dtype: str) -> Node: ...

    def linear(
        self,
        node: Node,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale: float | None = None,
    ) -> Node:
        """``node @ weight.T + bias``, ``weight`` ``[out, in]``.

        With ``scale``, both operands are float8: ``node`` divided by it, ``weight`` by its own largest value.
        """
        ...

    def matmul(self, a: Node, b: Node) -> Node: ...

    def add(self, a: Node, b: Node | float) -> Node: ...

    def subtract(self, a: Node, b: Node | float) -> Node: ...

    def multiply(self, a: Node, b: Node | float) -> Node: ...

    def divide(self, a: Node, b: Node | float) -> Node: ...

    def maximum(self, a: Node, b: Node | float) -> Node: ...

    def minimum(self, a: Node, b: Node | float) -> Node: ...

    def less(self, a: Node, b: Node | float) -> Node: ...

    def both(self, a: Node, b: Node) -> Node: ...

    def negate(self, a: Node) -> Node:
        """The opposite of a bool."""
        ...

    def is_nan(self, node: Node) -> Node: ...

    def sqrt(self, node: Node) -> Node: ...

    def select(self, condition: Node, a: Node, b: Node | float) -> Node: ...

    def activation(self, node: Node, name: str) -> Node:
        """gelu, gelu_tanh, sigmoid or relu."""
        ...

    def layer_norm(self, node: Node, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Node:
        """Over the last axis."""
        ...

    def sum(self, node: Node, axis: int, *, keep: bool = False) -> Node: ...

    def mean(self, node: Node, axis: int, *, keep: bool = False) -> Node: ...

    def reshape(self, node: Node, shape: Sequence[int]) -> Node:
        """0 keeps the size of the same axis, one -1 takes what is left."""
        ...

    def unsqueeze(self, node: Node, axis: int) -> Node: ...

    def permute(self, node: Node, order: Sequence[int]) -> Node: ...

    def part(self, node: Node, axis: int, start: int, size: int) -> Node: ...

    def drop_ends(self, node: Node) -> tuple[Node, Node]:
        """A one-dimensional tensor without its last, and without its first element."""
        ...

    def concatenate(self, nodes: Sequence[Node], axis: int) -> Node: ...

    def gather(self, table: Node, index: Node) -> Node:
        """Rows of ``table`` along its first axis; every index must lie inside."""
        ...

    def count(self, node: Node, axis: int) -> Node:
        """int32 ``[0, 1, …]``, as long as an axis of ``node``."""
        ...

    def attention(
        self, q: Node, k: Node, v: Node, *, mask: Node | None = None, bounds: tuple[Node, Node] | None = None
    ) -> Node:
        """Full attention of queries that are scaled already, with fewer key heads if wanted.

        Padded: ``[batch, heads, length, width]`` and bool ``mask`` ``[batch, 1, 1, length]``, true where a
        key counts. Packed: ``[tokens, heads, width]`` and the sequences' bounds, twice: for queries and keys.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Inputs that stand for what is served: uint8 ``[channels, height, width]`` and int32 ``[n]``."""

    tiles: Sequence[npt.NDArray[np.uint8]] = ()
    tokens: Sequence[npt.NDArray[np.int32]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """Which network to describe; ``stage`` vision, text, fused, embed, lm or post.

    ``dtype`` float32, bfloat16, float16 or float8; ``packed`` false pads every sequence of a text batch to
    one length; ``max_length`` is the longest sequence that the positions have to reach. ``samples`` are what
    float8 is calibrated with.
    """

    stage: str
    dtype: str
    packed: bool
    max_length: int
    samples: Samples = Samples()
