"""The torch engine on scores and on vectors of tokens: lanes, pieces and company change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.engine.batch import PackedInput, pack
from tessera.engine.factory import make_text_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.models import open_model
from tessera.models.base import OutputKind, sequential
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY
from tessera_tools.random_checkpoint.llama_rerank import TINY as RERANK
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.running import vectors

SPECS = {
    OutputKind.SCORE: replace(RERANK, hidden=64, heads=2, kv_heads=1, head_dim=32, temperature=0.5),
    OutputKind.TOKENS: replace(COLEMBED_TINY, image_size=64, base_vocab=600, hidden=64, head_dim=16),
}


@pytest.mark.parametrize("kind", SPECS)
def test_rows_of_a_batch_in_pieces(kind: OutputKind, tmp_path: Path) -> None:
    spec: Spec = SPECS[kind]
    write_checkpoint(tmp_path / "model", spec)
    model = open_model(tmp_path / "model")
    settings = EngineSettings(device="cpu", dtype="float32", max_batch_cost=8192, max_queue_cost=8192)
    engine = make_text_engine(model, settings, place(settings))
    random = np.random.default_rng(0)
    batch = pack(
        [
            PackedInput(tokens=random.integers(0, 600, size, dtype=np.int32), positions=sequential(size))
            for size in (1, 700, 300, 8, 2, 900, 64, 1500, 63, 1, 600, *([5] * 70))
        ]
    )
    output = engine.launch(batch).result()
    whole = vectors(model, model.load_text(dtype="float32", device="cpu"), batch)
    assert np.abs(output.values - whole).max() <= 1e-4
    found = list(output)
    assert len(found) == len(batch.lengths)
    for length, own in zip(batch.lengths, found, strict=True):
        rows, norms = own.values, own.norms
        assert rows.shape == ((length, 64) if kind is OutputKind.TOKENS else (1, 1))
        if kind is OutputKind.SCORE:
            assert norms.tolist() == [1.0]
        else:
            assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5) and norms.min() > 0
    engine.close()
