"""A head of weights over the vocabulary: SPLADE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear

from tessera.nn.forms.plain import activation_function
from tessera.nn.outputs import HeadRows
from tessera.nn.spec import VocabularySpec
from tessera.nn.tensors import TextTensors

_NONE: Final = -1


class VocabularyWeights(nn.Module):
    """Float32 weights of the ids whose logits are above 0 anywhere in an input, the largest ``most`` of them.

    ``log1p(relu(logits))``, and the maximum or the sum of it over the tokens, special ones too, as
    ``SpladePooling`` of ``sentence-transformers`` has it. Logits are those of BERT's masked language model:
    a product, an activation, LayerNorm, the decoder.
    """

    def __init__(self, spec: VocabularySpec) -> None:
        super().__init__()
        self.spec = spec
        self.dense = nn.Linear(spec.hidden, spec.hidden)
        self.norm = nn.LayerNorm(spec.hidden, eps=spec.eps)
        self.bias = nn.Parameter(torch.empty(spec.vocab_size))
        shape = spec.vocab_size, spec.hidden
        self.register_parameter("weight", None if spec.tied else nn.Parameter(torch.empty(shape)))

    def tie(self, table: torch.Tensor) -> None:
        """Take the embeddings of tokens ``[vocab_size, hidden]`` for the decoder, unless it has its own."""
        if self.spec.tied:
            assert isinstance(table, nn.Parameter)
            self.weight = table

    def forward(self, states: torch.Tensor, batch: TextTensors) -> HeadRows:
        spec, norm, lengths = self.spec, self.norm, batch.lengths
        rows = activation_function(spec.activation)(self.dense(states.to(self.bias.dtype)))
        rows = layer_norm(rows, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        starts = [0, *accumulate(lengths)]
        values, ids = [], []
        for first, last in pieces(lengths, spec.piece):
            bounds = batch.cu_seqlens[first : last + 1] - batch.cu_seqlens[first]
            weights = self._weights(rows[starts[first] : starts[last]], bounds)
            largest = weights.topk(spec.most, sorted=False)
            values.append(largest.values)
            ids.append(largest.indices.int().masked_fill(largest.values <= 0, _NONE))
        return HeadRows(torch.cat(values).view(-1, 1), torch.cat(ids).view(-1))

    def _weights(self, rows: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[inputs, vocab_size]`` of some inputs, more than one of no more than a piece."""
        parts = torch.split(rows, self.spec.piece)
        found = self._pooled(parts[0], bounds if len(parts) == 1 else None)
        for part in parts[1:]:
            more = self._pooled(part, None)
            found = found + more if self.spec.sums else torch.maximum(found, more)
        # The largest logit has the largest weight.
        return found if self.spec.sums else self._activated(found)

    def _pooled(self, rows: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor:
        """Return float32 sums of weights, or largest logits above 0; without bounds all rows are one's."""
        logits = linear(rows, self.weight, self.bias)
        if self.spec.sums:
            logits = self._activated(logits.float())
        if bounds is None:
            return (
                logits.sum(0, keepdim=True) if self.spec.sums else logits.amax(0, keepdim=True).relu().float()
            )
        # With offsets nothing is checked, so nothing waits for the device.
        reduce = "sum" if self.spec.sums else "max"
        return torch.segment_reduce(logits, reduce, offsets=bounds, axis=0, initial=0).float()

    def _activated(self, logits: torch.Tensor) -> torch.Tensor:
        weights = logits.relu().log1p()
        return weights.log1p() if self.spec.twice else weights


def pieces(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield the first input and the one behind the last of each piece: of ``most`` tokens, or one input."""
    first, tokens = 0, 0
    for number, length in enumerate(lengths):
        if number > first and tokens + length > most:
            yield first, number
            first, tokens = number, 0
        tokens += length
    yield first, len(lengths)
