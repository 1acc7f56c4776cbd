"""ColBERT's rows on the card, with graphs and without, beside float32 on a CPU, which is compared as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.engine.batch import PackedInput, pack
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.text import TorchTextEngine
from tessera.models import open_model
from tessera.rows import Rows
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.colbert import ROBERTA_TINY, TINY, ColbertSpec
from tests.models.colbert.test_parity import SIDES, TEXTS, prompt_of
from tests.models.running import cosines

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KINDS = [("cpu", "float32", 0), ("cuda", "float32", 0), ("cuda", "bfloat16", 0), ("cuda", "bfloat16", None)]
BARS = {"float32": 0.99999, "bfloat16": 0.998}


def rows_of(path: Path, device: str, dtype: str, graph_cost: int | None) -> list[list[Rows]]:
    """The rows of queries and documents in one batch, twice: the second uses memory of the first again."""
    model = open_model(path)
    settings = EngineSettings(max_batch_cost=4096, max_queue_cost=100_000, graph_cost=graph_cost)
    engine = TorchTextEngine(model, settings, Placement(device=device, dtype=dtype))
    engine.warm()
    tokens = [prompt_of(model, text, role).tokens for role in SIDES for text in TEXTS]
    batch = pack([PackedInput(tokens=each, positions=model.positions(each, ())) for each in tokens])
    found = [list(engine.launch(batch).result()) for _ in range(2)]
    engine.close()
    return found


@pytest.mark.parametrize(
    ("device", "dtype", "graph_cost"), KINDS, ids=["cpu", "float32", "bfloat16", "graphs"]
)
@pytest.mark.parametrize("spec", [TINY, ROBERTA_TINY], ids=["bert", "xlm_roberta"])
def test_rows(tmp_path: Path, spec: ColbertSpec, device: str, dtype: str, graph_cost: int | None) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    write_checkpoint(tmp_path / "it", spec, seed=0)
    expected = rows_of(tmp_path / "it", "cpu", "float32", 0)[0]
    for found in rows_of(tmp_path / "it", device, dtype, graph_cost):
        for own, wanted in zip(found, expected, strict=True):
            ours, theirs = own.held().values, wanted.held().values
            assert ours.shape == theirs.shape
            assert cosines(ours, theirs).min() >= BARS[dtype]
