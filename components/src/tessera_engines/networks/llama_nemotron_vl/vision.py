"""The vision stage: uint8 tiles to rows of the backbone's width."""

from __future__ import annotations

from typing import cast

from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.vision import LlamaNemotronVision
from tessera.nn.layer import Layer, LayerNorm, Mlp
from tessera.nn.spec import CHANNELS
from tessera_engines.networks.graph import UNITS, Node
from tessera_engines.networks.llama_nemotron_vl.arithmetic import Arithmetic


class VisionNetwork:
    """Writes the weights of ``tower`` and what is done with them into the graph of ``arithmetic``."""

    def __init__(self, arithmetic: Arithmetic, config: ModelConfig, tower: LlamaNemotronVision) -> None:
        self._graph = arithmetic.graph
        self._arithmetic = arithmetic
        self._config = config
        self._tower = tower

    def tiles(self) -> Node:
        size = self._config.image.tile_size
        return self._graph.input("tiles", "uint8", (UNITS, CHANNELS, size, size))

    def rows(self, tiles: Node) -> Node:
        """``[tiles, tokens_per_tile, hidden]`` in the products' type."""
        graph, encoder = self._graph, self._tower.vision
        with graph.within("vision.embeddings"):
            hidden = self._embedded(tiles)
        for number, layer in enumerate(encoder.layers.layers):
            with graph.within(f"vision.layers.{number}"):
                hidden = self._layer(hidden, layer)
        with graph.within("projector"):
            if encoder.post_layernorm is not None:
                hidden = self._arithmetic.layer_norm(hidden, encoder.post_layernorm)
            return self._projected(hidden)

    def _embedded(self, tiles: Node) -> Node:
        graph, vision, encoder = self._graph, self._config.vision, self._tower.vision
        grid, patch = vision.grid, vision.patch_size
        pixels = graph.reshape(graph.cast(tiles, "float32"), (0, CHANNELS, grid, patch, grid, patch))
        patches = graph.reshape(
            graph.permute(pixels, (0, 2, 4, 1, 3, 5)), (0, grid * grid, vision.patch_features)
        )
        mean, std = (
            graph.constant(value.float().view(1, 1, -1))
            for value in (encoder.patches.mean, encoder.patches.std)
        )
        scaled = graph.divide(graph.subtract(graph.divide(patches, 255.0), mean), std)
        embedded = self._arithmetic.linear(scaled, encoder.patches.projection)
        where = graph.constant(encoder.positions.weight.unsqueeze(0))
        return graph.add(*(graph.cast(node, self._arithmetic.residual) for node in (embedded, where)))

    def _layer(self, hidden: Node, layer: Layer) -> Node:
        arithmetic, mlp = self._arithmetic, cast(Mlp, layer.mlp)
        normed = arithmetic.layer_norm(hidden, cast(LayerNorm, layer.input_layernorm))
        attended = self._attended(arithmetic.linear(normed, layer.self_attn.qkv_proj))
        projected = arithmetic.linear(attended, layer.self_attn.o_proj)
        hidden = arithmetic.add(hidden, projected)
        normed = arithmetic.layer_norm(hidden, cast(LayerNorm, layer.post_attention_layernorm))
        wide = arithmetic.linear(normed, mlp.up_proj)
        active = arithmetic.activation(wide, self._config.vision.layer.activation)
        narrowed = arithmetic.narrowed(active)
        return arithmetic.add(hidden, arithmetic.linear(narrowed, mlp.down_proj))

    def _attended(self, qkv: Node) -> Node:
        graph, layer = self._graph, self._config.vision.layer
        width = layer.head_dim
        q, k, v = (
            graph.permute(
                graph.reshape(
                    graph.part(qkv, -1, number * layer.hidden, layer.hidden), (0, 0, layer.heads, width)
                ),
                (0, 2, 1, 3),
            )
            for number in range(3)
        )
        # Scaled in float32, because the scale itself has no exact form in fewer bits.
        scaled = graph.cast(graph.multiply(graph.cast(q, "float32"), width**-0.5), q.dtype)
        attended = graph.permute(graph.attention(scaled, k, v), (0, 2, 1, 3))
        return graph.reshape(attended, (0, 0, layer.hidden))

    def _projected(self, features: Node) -> Node:
        graph, arithmetic, projector = self._graph, self._arithmetic, self._config.projector
        channels, factor = self._config.vision.layer.hidden, projector.factor
        edge = self._config.vision.grid // factor
        blocks = graph.reshape(features, (0, edge, factor, edge, factor, channels))
        order = (0, 1, 3, 2, 4, 5) if projector.version == "v2" else (0, 3, 1, 2, 4, 5)
        joined = graph.reshape(graph.permute(blocks, order), (0, edge * edge, factor**2 * channels))
        merger = self._tower.projector
        normed = arithmetic.layer_norm(joined, merger.norm)
        wide = arithmetic.linear(normed, merger.linear_1)
        active = arithmetic.narrowed(arithmetic.activation(wide, "gelu"))
        return arithmetic.linear(active, merger.linear_2)
