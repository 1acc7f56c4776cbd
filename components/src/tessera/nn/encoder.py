"""A tower of the BERT kind: learned positions and token types, post-norm layers, pooling."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from tessera.nn.forms.plain import Residual, tensor
from tessera.nn.sequences import Kept, Sequences
from tessera.nn.spec import EncoderSpec, HeadSpec
from tessera.nn.table import Table
from tessera.nn.text import Embedded, Head, TextTower


class ScoreHead(Head):
    """A product with tanh, then the head; float32 whatever type the weights have."""

    def __init__(self, spec: HeadSpec, hidden: int) -> None:
        super().__init__(spec, hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner = linear(rows, self.dense.weight.float(), self.dense.bias.float())
        return super().forward(inner.tanh())


class EncoderTower(TextTower):
    """Implements ``tessera.models.base.SplitTextModule``.

    ``positions`` ``[2, tokens]`` has types behind, and with ``skips`` what pooling leaves out behind these.
    """

    spec: EncoderSpec

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__(spec)
        hidden = spec.layer.hidden
        self.embed_positions = Table(spec.positions, hidden)
        self.embed_types = Table(spec.types, hidden)
        if spec.head is not None:
            self.head = ScoreHead(spec.head, hidden)

    def pooling(self, sequences: Sequences, cu_seqlens: torch.Tensor, positions: torch.Tensor) -> Sequences:
        """Return the sequences as pooling sees them."""
        return Kept(cu_seqlens, positions[2]) if self.spec.skips else sequences

    def encode(self, embedded: Embedded, positions: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """The last hidden state ``[tokens, hidden]``."""
        places, types = positions[:2]
        stream = Residual(embedded[0] + self.embed_positions(places) + self.embed_types(types))
        self.layers(stream, sequences, None)
        assert self.norm is not None
        return tensor(self.norm(stream))
