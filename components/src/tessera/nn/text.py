"""A text tower: token embeddings, layers over a packed batch, pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from tessera.nn.forms.choice import form_for
from tessera.nn.forms.plain import Form, Residual, tensor
from tessera.nn.layer import Stack, Tower, norm
from tessera.nn.outputs import CHUNKS, STATES, HeadRows, OutputHead
from tessera.nn.rotary import Rotary
from tessera.nn.sequences import Sequences, pool
from tessera.nn.spec import HeadSpec, TextSpec
from tessera.nn.steps import step_modules
from tessera.nn.table import Table
from tessera.nn.tensors import TextTensors

Embedded = tuple[torch.Tensor, ...]
"""``[tokens, hidden]``; with DeepStack ``[tokens, levels * hidden]`` behind it, 0 but at vision rows."""


class Head(nn.Linear):
    """Float32 ``[rows, hidden]`` to float32 ``[rows, width]``, whatever type the weights have."""

    def __init__(self, spec: HeadSpec, hidden: int) -> None:
        super().__init__(hidden, spec.width, bias=spec.bias)
        self.temperature = spec.temperature
        self.against = nn.Parameter(torch.empty(spec.width, hidden)) if spec.contrast else None
        self.dense = None if spec.dense is None else nn.Linear(hidden, hidden)
        self.activation = torch.relu if spec.dense == "relu" else torch.tanh

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.dense is not None:
            rows = self.activation(linear(rows, self.dense.weight.float(), self.dense.bias.float()))
        bias = None if self.bias is None else self.bias.float()
        weight = self.weight.float()
        # Exact where the weights have half precision, as no difference of two rounded logits is.
        weight = weight if self.against is None else weight - self.against.float()
        return linear(rows, weight, bias) / self.temperature


class Finish(Protocol):
    """The modules behind pooling, of a tower or of its last stage alone."""

    spec: TextSpec
    head: Head | None
    steps: nn.ModuleList


def finished(
    pooled: torch.Tensor, hidden: torch.Tensor, sequences: Sequences, finish: Finish
) -> torch.Tensor:
    """Do what follows pooling: the head, further ways of pooling, the steps, and the cut; float32."""
    spec, rows = finish.spec, pooled if finish.head is None else finish.head(pooled)
    if spec.besides:
        rows = torch.cat([rows, *(pool(hidden, sequences, pooling) for pooling in spec.besides)], dim=1)
    for step in finish.steps:
        rows = step(rows)
    return rows if spec.cut is None else rows[:, : spec.cut].contiguous()


class TextTower(Tower):
    """Implements ``tessera.models.base.SplitTextModule``.

    Built on the ``meta`` device and filled from weight files; ``prepare`` then makes it ready to run.
    """

    def __init__(self, spec: TextSpec) -> None:
        super().__init__()
        self.spec = spec
        hidden = spec.layer.hidden
        self.embed_tokens = Table(spec.vocab_size, hidden)
        self.layers = Stack(spec.layer, spec.layers)
        self.norm = norm(spec.layer.norm, hidden, eps=spec.layer.eps) if spec.final_norm else None
        self.head = None if spec.head is None else Head(spec.head, hidden)
        self.steps = step_modules(spec.steps)
        self._pools_alone = self.head is None and spec.width == spec.pooled_width == hidden and not spec.steps
        self.name = ""
        self.heads: Mapping[str, OutputHead] = {}
        self.rotary: Rotary

    def prepare(self, device: torch.device, form: Form | None = None) -> TextTower:
        """Choose the form of the operations, by device and type if it is not given.

        Call it once the weights are in place.
        """
        self.rotary = Rotary.of(self.spec.rope, self.spec.layer.head_dim, device)
        self.form = form_for(device, self.embed_tokens.weight.dtype) if form is None else form
        self.layers.prepare(self.form, final=self.norm)
        return self.eval()

    def give(self, name: str, heads: Mapping[str, OutputHead]) -> TextTower:
        """Name the default output, and give the heads by name; the tower's own rows are of none of these."""
        self.name, self.heads = name, heads
        return self

    def forward(self, batch: TextTensors) -> torch.Tensor:
        embedded = self.embed(batch.input_ids, batch.vision_rows, batch.vision_index)
        return self.pooled(embedded, batch.positions, batch.cu_seqlens, batch.lengths)

    def embed(
        self, input_ids: torch.Tensor, vision_rows: torch.Tensor, vision_index: torch.Tensor
    ) -> Embedded:
        """Return token embeddings with the vision rows in their places."""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        if self.spec.levels or vision_index.shape[0]:
            return self._with_vision(embedded, vision_rows, vision_index)
        return (embedded,)

    def _with_vision(
        self, embedded: torch.Tensor, vision_rows: torch.Tensor, vision_index: torch.Tensor
    ) -> Embedded:
        hidden, levels = self.spec.layer.hidden, self.spec.levels
        deep = [embedded.new_zeros(len(embedded), levels * hidden)] if levels else []
        if vision_index.shape[0]:
            rows, at = vision_rows.to(embedded.dtype), vision_index.to(torch.int64)
            for whole, part in zip((embedded, *deep), (rows[:, :hidden], rows[:, hidden:]), strict=False):
                whole.index_copy_(0, at, part)
        return (embedded, *deep)

    def pooled(
        self, embedded: Embedded, positions: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """What follows ``embed``, whose tensors may be overwritten."""
        sequences = self.form.packed(cu_seqlens, lengths)
        hidden = self.encode(embedded, positions, sequences)
        return self.rows(hidden, self.pooling(sequences, cu_seqlens, positions))

    def pooling(self, sequences: Sequences, cu_seqlens: torch.Tensor, positions: torch.Tensor) -> Sequences:
        """Return the sequences as pooling sees them."""
        return sequences

    def named(self, names: Sequence[str], batch: TextTensors) -> list[HeadRows]:
        """Give outputs by name of one pass: the tower's own rows, hidden states, and those of ``heads``.

        The rows of chunks are pooled as the tower's own are, of segments in place of sequences.
        """
        sequences = self.form.packed(batch.cu_seqlens, batch.lengths)
        embedded = self.embed(batch.input_ids, batch.vision_rows, batch.vision_index)
        hidden = self.encode(embedded, batch.positions, sequences)
        asked = [name or self.name for name in names]
        of_tower = self.name not in self.heads
        states = None if of_tower and set(asked) <= {self.name, CHUNKS} else hidden.float()
        found: list[HeadRows] = []
        pooling = self.pooling(sequences, batch.cu_seqlens, batch.positions)
        for name in asked:
            if name == CHUNKS:
                assert batch.segments is not None
                # Pooling needs no lengths on the host.
                found.append(HeadRows(self.rows(hidden, self.form.packed(batch.segments, ()))))
            elif states is None or (of_tower and name == self.name):
                found.append(HeadRows(self.rows(hidden, pooling)))
            elif name == STATES:
                found.append(HeadRows(states))
            else:
                found.append(self.heads[name](states, batch))
        return found

    def rows(self, hidden: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """What the last hidden state is pooled to, and what follows: float32."""
        pooled = pool(hidden, sequences, self.spec.pooling)
        return pooled if self._pools_alone else finished(pooled, hidden, sequences, self)

    def encode(self, embedded: Embedded, positions: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """The last hidden state ``[tokens, hidden]``, behind the final norm if there is one."""
        stream = Residual(embedded[0])
        deep = self._deep(embedded) if self.spec.levels else None
        self.layers(stream, sequences, self.rotary(positions), deep)
        if self.norm is None:
            return self.layers.output(stream, len(self.layers) - 1)
        return tensor(self.norm(stream))

    def _deep(self, embedded: Embedded) -> Callable[[int, Residual], None]:
        """Return the addition of DeepStack's levels behind the first layers."""
        levels = embedded[1].chunk(self.spec.levels, dim=1)

        def add(number: int, stream: Residual) -> None:
            if number < len(levels):
                self.form.add(stream, levels[number])

        return add
