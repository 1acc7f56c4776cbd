from __future__ import annotations

import pytest
import torch
from tessera.models.llama_nemotron_vl.pooling import pool

from tessera.models.llama_nemotron_vl.config import Pooling

LENGTHS = [1, 4, 2, 9]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("kind", ["avg", "last", "cls"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_sequence_is_pooled_in_float32(kind: Pooling, dtype: torch.dtype) -> None:
    hidden = torch.randn(sum(LENGTHS), 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = [part.float() for part in hidden.split(LENGTHS)]
    reduce = {"avg": lambda part: part.mean(0), "last": lambda part: part[-1], "cls": lambda part: part[0]}
    found = pool(hidden, BOUNDS, kind)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack([reduce[kind](part) for part in parts]))


def test_long_sequences_keep_their_precision() -> None:
    hidden = torch.full((8192, 2), 0.1, dtype=torch.bfloat16)
    mean = pool(hidden, torch.tensor([0, 8192], dtype=torch.int32), "avg")
    torch.testing.assert_close(mean, hidden[:1].float(), rtol=1e-5, atol=0)
