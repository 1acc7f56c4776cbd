"""A long input against transformers' own model reading the same files."""

from __future__ import annotations

import pytest

from tessera.models.qwen3_embedding.model import Options, Qwen3Embedding
from tessera_tools.random_checkpoint.qwen3 import TINY
from tests.models.conftest import WriteCheckpoint
from tests.models.parity import (
    BARS,
)
from tests.models.qwen3_embedding.cases import CASES, WORDS
from tests.models.running import Given, batch_of, cosines, vectors
from tests.references.qwen3 import Qwen3Reference

pytestmark = pytest.mark.parity


def test_eight_thousand_tokens(written: WriteCheckpoint) -> None:
    path = written(TINY, dtype="bfloat16")
    model = Qwen3Embedding(path, Options())
    batch = batch_of(model, None, [Given(parts=(WORDS * 370,)), CASES[0]])
    assert 8000 < batch.lengths[0] < 8400
    found = vectors(model, model.load_text(dtype="float32", device="cpu"), batch)
    expected = Qwen3Reference(path).vector(batch.input_ids[: batch.lengths[0]].tolist())
    assert cosines(found[:1], expected[None])[0] >= BARS["float32"]
