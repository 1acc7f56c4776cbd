"""Heads that make a row of each token: its weight for a sparse output, or a vector of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import torch
from torch import nn
from torch.nn.functional import linear

from tessera.nn.outputs import HeadRows
from tessera.nn.tensors import TextTensors

_NONE: Final = -1


class TokenWeights(nn.Module):
    """Float32 ``[tokens, 1]``, ``relu(W h + b)``; tokens of the ``dropped`` ids have none.

    As FlagEmbedding's ``M3Embedder._sparse_embedding`` and ``_process_token_weights``.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    dropped: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, dropped: Collection[int]) -> None:
        super().__init__()
        self.register_buffer("weight", weight.float())
        self.register_buffer("bias", bias.float())
        self.register_buffer("dropped", torch.tensor(sorted(dropped), dtype=torch.int32))

    def forward(self, states: torch.Tensor, batch: TextTensors) -> HeadRows:
        weights = linear(states, self.weight, self.bias).relu()
        dropped = torch.isin(batch.input_ids, self.dropped)
        return HeadRows(weights, batch.input_ids.masked_fill(dropped, _NONE))


class EachWeight(TokenWeights):
    """Float32 ``[tokens, 1]`` as ``TokenWeights``, of every token but the first and the last of an input.

    As vLLM's ``BgeM3EmbeddingModel`` pools for ``token_classify``.
    """

    def forward(self, states: torch.Tensor, batch: TextTensors) -> HeadRows:
        weights = linear(states, self.weight, self.bias).relu()
        ends = torch.cat([batch.cu_seqlens[:-1], batch.cu_seqlens[1:] - 1]).long()
        return HeadRows(weights, batch.input_ids.index_fill(0, ends, _NONE))


class TokenVectors(nn.Module):
    """Float32 ``[tokens, width]``, ``W h + b``; the first token of an input has none.

    As FlagEmbedding's ``M3Embedder._colbert_embedding``.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.float())
        self.register_buffer("bias", bias.float())

    def forward(self, states: torch.Tensor, batch: TextTensors) -> HeadRows:
        indices = batch.input_ids.index_fill(0, batch.cu_seqlens[:-1].long(), _NONE)
        return HeadRows(linear(states, self.weight, self.bias), indices)
