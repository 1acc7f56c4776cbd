"""The two ways in which sequences lie in a text batch: their inputs, positions, attention and pooling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from tessera_engines.networks.graph import BOUNDS, SEQUENCES, TOKENS, Axis, Graph, Node


class Layout(ABC):
    """``axes`` are those before the channels.

    Inputs that several parts of a network share are declared at their first use.
    """

    axes: ClassVar[tuple[Axis, ...]]

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._declared: dict[str, Node] = {}

    @property
    def lead(self) -> int:
        """How many axes there are before the channels."""
        return len(self.axes)

    def ids(self, name: str) -> Node:
        """int32, one for each token."""
        return self._int32(name, *self.axes)

    def hidden(self, name: str, dtype: str, width: int) -> Node:
        return self._graph.input(name, dtype, (*self.axes, width))

    def _int32(self, name: str, *shape: Axis) -> Node:
        if name not in self._declared:
            self._declared[name] = self._graph.input(name, "int32", shape)
        return self._declared[name]

    @abstractmethod
    def positions(self, hidden: Node) -> Node:
        """int32, one-dimensional, of the tokens of each sequence in the batch or of all sequences alike."""

    @abstractmethod
    def attention(self, q: Node, k: Node, v: Node, hidden: Node) -> Node:
        """``[*lead, heads, width]`` each, with fewer heads in ``k`` and ``v``."""

    @abstractmethod
    def mean(self, hidden: Node) -> Node:
        """float32 ``[*lead, width]`` to ``[sequences, width]``."""

    @abstractmethod
    def edge(self, hidden: Node, *, last: bool) -> Node:
        """The first or last row of each sequence."""


class Padded(Layout):
    """``[sequences, tokens, …]``, and int32 ``lengths`` of at least 1."""

    axes = SEQUENCES, TOKENS
    _mask: Node | None = None
    _kept: Node | None = None

    def positions(self, hidden: Node) -> Node:
        return self._graph.count(hidden, 1)

    def attention(self, q: Node, k: Node, v: Node, hidden: Node) -> Node:
        graph = self._graph
        if self._mask is None:
            self._mask = graph.unsqueeze(graph.unsqueeze(self._inside(hidden), 1), 1)
        mask = self._mask
        heads_first = (graph.permute(heads, (0, 2, 1, 3)) for heads in (q, k, v))
        return graph.permute(graph.attention(*heads_first, mask=mask), (0, 2, 1, 3))

    def mean(self, hidden: Node) -> Node:
        graph = self._graph
        # Selected, not multiplied: nothing that stands in the padding can spoil the sum.
        kept = graph.select(graph.unsqueeze(self._inside(hidden), 2), hidden, 0.0)
        lengths = graph.unsqueeze(graph.cast(self._lengths(), "float32"), 1)
        return graph.divide(graph.sum(kept, 1), lengths)

    def edge(self, hidden: Node, *, last: bool) -> Node:
        graph = self._graph
        if not last:
            return graph.sum(graph.part(hidden, 1, 0, 1), 1)
        before = graph.less(
            graph.unsqueeze(graph.count(hidden, 1), 0),
            graph.subtract(graph.unsqueeze(self._lengths(), 1), 1),
        )
        chosen = graph.both(self._inside(hidden), graph.negate(before))
        return graph.sum(graph.select(graph.unsqueeze(chosen, 2), hidden, 0.0), 1)

    def _lengths(self) -> Node:
        return self._int32("lengths", SEQUENCES)

    def _inside(self, hidden: Node) -> Node:
        """bool ``[sequences, tokens]``; the same for every tensor of a network."""
        graph = self._graph
        if self._kept is None:
            at = graph.unsqueeze(graph.count(hidden, 1), 0)
            self._kept = graph.less(at, graph.unsqueeze(self._lengths(), 1))
        return self._kept


class Packed(Layout):
    """``[tokens, …]``, int32 ``positions`` and the sequences' bounds.

    The bounds come twice, as ``query_lengths`` and ``key_value_lengths``: TensorRT crashes when one tensor is
    both.
    """

    axes = (TOKENS,)

    def positions(self, hidden: Node) -> Node:
        return self._int32("positions", TOKENS)

    def attention(self, q: Node, k: Node, v: Node, hidden: Node) -> Node:
        bounds = self._int32("query_lengths", BOUNDS), self._int32("key_value_lengths", BOUNDS)
        return self._graph.attention(q, k, v, bounds=bounds)

    def mean(self, hidden: Node) -> Node:
        graph = self._graph
        starts, ends = graph.drop_ends(self._int32("query_lengths", BOUNDS))
        at = graph.unsqueeze(graph.count(hidden, 0), 0)
        before = graph.less(at, graph.unsqueeze(starts, 1))
        inside = graph.both(graph.less(at, graph.unsqueeze(ends, 1)), graph.negate(before))
        weights = graph.cast(inside, "float32")
        # A product adds every token to every sequence with weight 0 or 1: a NaN must not be in it.
        missing = graph.is_nan(hidden)
        sums = graph.matmul(weights, graph.select(graph.negate(missing), hidden, 0.0))
        spoilt = graph.matmul(weights, graph.cast(missing, "float32"))
        lengths = graph.cast(graph.unsqueeze(graph.subtract(ends, starts), 1), "float32")
        # A bound is repeated for sequences that only fill the batch up; nobody reads what they become.
        means = graph.divide(sums, graph.maximum(lengths, 1.0))
        unfit = graph.add(graph.multiply(means, 0.0), graph.constant(torch.full((1, 1), float("nan"))))
        return graph.select(graph.less(graph.multiply(spoilt, -1.0), 0.0), unfit, means)

    def edge(self, hidden: Node, *, last: bool) -> Node:
        graph = self._graph
        starts, ends = graph.drop_ends(self._int32("query_lengths", BOUNDS))
        at = graph.subtract(ends, 1) if last else starts
        return graph.gather(hidden, graph.maximum(at, 0))
