"""The text stage: tokens and vision rows to unit vectors and the lengths they had before."""

from __future__ import annotations

from typing import cast

import torch

from tessera.nn.layer import GatedMlp, Layer
from tessera.nn.text import TextTower
from tessera_engines.networks.graph import ROWS, Node
from tessera_engines.networks.llama_nemotron_vl.arithmetic import Arithmetic
from tessera_engines.networks.llama_nemotron_vl.layout import Layout


class TextNetwork:
    """Writes the weights of ``tower`` and what is done with them into the graph of ``arithmetic``."""

    def __init__(self, arithmetic: Arithmetic, tower: TextTower, layout: Layout) -> None:
        self._graph = arithmetic.graph
        self._arithmetic = arithmetic
        self._spec = tower.spec.layer
        self._tower = tower
        self._layout = layout

    def embedded(self, rows: Node | None) -> Node:
        """Token embeddings with ``rows`` ``[vision, hidden]``, or those of an input, where they belong.

        ``vision_row`` names the row for each token, -1 for none.
        """
        graph = self._graph
        products, width = self._arithmetic.products, self._spec.hidden
        tokens = self._layout.ids("input_ids")
        row = self._layout.ids("vision_row")
        if rows is None:
            rows = graph.input("vision_rows", products, (ROWS, width))
        words = graph.gather(graph.constant(self._tower.embed_tokens.weight), tokens)
        images = graph.gather(rows, graph.maximum(row, 0))
        is_word = graph.unsqueeze(graph.less(row, 0), self._layout.lead)
        return graph.select(is_word, words, images)

    def encoded(self, embedded: Node, max_length: int) -> Node:
        """The last hidden state after the final norm, in the products' type."""
        graph, arithmetic = self._graph, self._arithmetic
        with graph.within("text.positions"):
            turns = self._turns(embedded, max_length)
            hidden = graph.cast(embedded, arithmetic.residual)
        for number, layer in enumerate(self._tower.layers.layers):
            with graph.within(f"text.layers.{number}"):
                hidden = self._layer(hidden, layer, turns)
        assert self._tower.norm is not None
        with graph.within("text.norm"):
            return arithmetic.rms_norm(hidden, self._tower.norm.weight, self._spec.eps)

    def finish(self, hidden: Node) -> None:
        """Output unit ``vectors`` ``[sequences, hidden]`` and ``norms`` ``[sequences]``, both float32."""
        graph = self._graph
        with graph.within("text.pooling"):
            pooled = self._pooled(hidden)
            norms = graph.sqrt(graph.sum(graph.multiply(pooled, pooled), 1, keep=True))
            graph.output("vectors", graph.divide(pooled, graph.maximum(norms, 1e-12)))
            graph.output("norms", graph.sum(norms, 1))

    def _pooled(self, hidden: Node) -> Node:
        """float32 ``[sequences, hidden]``."""
        exact = self._graph.cast(hidden, "float32")
        if self._tower.spec.pooling == "mean":
            return self._layout.mean(exact)
        return self._layout.edge(exact, last=self._tower.spec.pooling == "last")

    def _turns(self, hidden: Node, max_length: int) -> tuple[Node, Node]:
        """float32 cosines and sines, ``[*lead, 1, head_dim / 2]`` or what broadcasts to it.

        Looked up in tables that were computed in float32: a device's own functions lose digits at the
        angles of long sequences.
        """
        graph = self._graph
        positions = self._layout.positions(hidden)
        rotation = self._tower.rotary(torch.arange(max_length, dtype=torch.int32)[None])
        found = []
        for table in (rotation.cosines, rotation.sines):
            turn = graph.gather(graph.constant(table), positions)
            found.append(graph.unsqueeze(turn, 0) if self._layout.lead == 2 else turn)
        return found[0], found[1]

    def _layer(self, hidden: Node, layer: Layer, turns: tuple[Node, Node]) -> Node:
        graph, arithmetic = self._graph, self._arithmetic
        eps, wide = self._spec.eps, self._spec.intermediate
        mlp = cast(GatedMlp, layer.mlp)
        normed = arithmetic.rms_norm(hidden, layer.input_layernorm.weight, eps)
        attended = self._attended(arithmetic.linear(normed, layer.self_attn.qkv_proj), turns)
        projected = arithmetic.linear(attended, layer.self_attn.o_proj)
        hidden = arithmetic.add(hidden, projected)
        normed = arithmetic.rms_norm(hidden, layer.post_attention_layernorm.weight, eps)
        both = arithmetic.linear(normed, mlp.gate_up_proj)
        gate = arithmetic.activation(graph.part(both, -1, 0, wide), self._spec.activation)
        up = graph.cast(graph.part(both, -1, wide, wide), "float32")
        gated = arithmetic.narrowed(graph.multiply(gate, up))
        return arithmetic.add(hidden, arithmetic.linear(gated, mlp.down_proj))

    def _attended(self, qkv: Node, turns: tuple[Node, Node]) -> Node:
        graph, spec, width = self._graph, self._spec, self._spec.head_dim
        keep = [0] * self._layout.lead
        heads = graph.reshape(qkv, (*keep, spec.heads + 2 * spec.kv_heads, width))
        axis = self._layout.lead
        turned = self._turned(graph.part(heads, axis, 0, spec.heads + spec.kv_heads), turns)
        q = graph.multiply(graph.part(turned, axis, 0, spec.heads), width**-0.5)
        k = graph.part(turned, axis, spec.heads, spec.kv_heads)
        v = graph.part(heads, axis, spec.heads + spec.kv_heads, spec.kv_heads)
        q, k = graph.cast(q, v.dtype), graph.cast(k, v.dtype)
        attended = self._layout.attention(q, k, v, qkv)
        return graph.reshape(attended, (*keep, spec.heads * width))

    def _turned(self, heads: Node, turns: tuple[Node, Node]) -> Node:
        """Rotated in float32, and left there."""
        graph, half = self._graph, self._spec.head_dim // 2
        cosines, sines = turns
        exact = graph.cast(heads, "float32")
        first, second = graph.part(exact, -1, 0, half), graph.part(exact, -1, half, half)
        return graph.concatenate(
            [
                graph.subtract(graph.multiply(first, cosines), graph.multiply(second, sines)),
                graph.add(graph.multiply(second, cosines), graph.multiply(first, sines)),
            ],
            -1,
        )
