"""A tower with learned positions, and token types where there are some: BERT's kind, and CLIP's."""

from __future__ import annotations

import torch

from tessera.nn.forms.plain import Residual, tensor
from tessera.nn.sequences import Kept, Packed, Sequences
from tessera.nn.spec import EncoderSpec
from tessera.nn.table import Table
from tessera.nn.text import Embedded, TextTower


class EncoderTower(TextTower):
    """Implements ``tessera.models.base.SplitTextModule``.

    ``positions`` has a row of places, one of types if there are types, and with ``skips`` one of what
    pooling leaves out, or with ``keyed`` one of what attention looks at.
    """

    spec: EncoderSpec

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__(spec)
        hidden = spec.layer.hidden
        self.embed_positions = Table(spec.positions, hidden)
        self.embed_types = Table(spec.types, hidden) if spec.types else None

    def pooling(self, sequences: Sequences, cu_seqlens: torch.Tensor, positions: torch.Tensor) -> Sequences:
        """Return the sequences as pooling sees them."""
        return Kept(cu_seqlens, positions[-1]) if self.spec.skips else sequences

    def encode(self, embedded: Embedded, positions: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """The last hidden state ``[tokens, hidden]``."""
        rows = embedded[0] + self.embed_positions(positions[0])
        if self.embed_types is not None:
            rows = rows + self.embed_types(positions[1])
        stream = Residual(rows)
        self.layers(stream, self._keyed(sequences, positions) if self.spec.keyed else sequences, None)
        assert self.norm is not None
        return tensor(self.norm(stream))

    def _keyed(self, sequences: Sequences, positions: torch.Tensor) -> Sequences:
        """Return the sequences as attention sees them, by the last row of the positions."""
        assert isinstance(sequences, Packed)
        bounds = sequences.cu_seqlens
        # Empty sequences may stand behind the last row, where a CUDA graph has room for more of them.
        keys = positions[-1].index_select(0, bounds[:-1].clamp(max=positions.shape[1] - 1))
        # On the host a look costs nothing, and documents are as if there were no queries.
        if not keys.is_cuda and bool((keys == bounds.diff()).all()):
            return sequences
        return self.form.keyed(bounds, sequences.lengths, keys)
