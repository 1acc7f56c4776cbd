"""BGE M3's outputs on the card, in a batch that asks for several of them, beside float32 on a CPU."""

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
from tessera_tools.random_checkpoint.encoder import M3_TINY
from tests.models.running import cosines
from tests.models.xlm_roberta.test_m3 import NAMES, TEXTS, ids, weights_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ASKED = [NAMES, ("sparse",), (), ("multivector", "dense")]
# The worst cosine of vectors, and how far weights are apart beside the largest.
BARS = {"float32": (0.99999, 1e-4), "bfloat16": (0.998, 0.05)}


def answers(path: Path, device: str, dtype: str) -> list[list[list[Rows]]]:
    """The answers to the texts, each with a row set for every output, twice.

    Twice, because the memory of the first batch is used again.
    """
    model = open_model(path)
    settings = EngineSettings(max_batch_cost=4096, max_queue_cost=100_000)
    engine = TorchTextEngine(model, settings, Placement(device=device, dtype=dtype))
    engine.warm()
    tokens = [ids(model, text) for text in TEXTS]
    batch = pack(
        [
            PackedInput(tokens=each, positions=model.positions(each, ()), asked=names)
            for each, names in zip(tokens, ASKED, strict=True)
        ]
    )
    found = [[list(rows.each()) for rows in engine.launch_named(batch).result()] for _ in range(2)]
    engine.close()
    return found


@pytest.mark.parametrize("dtype", BARS)
def test_outputs_of_one_pass(tmp_path: Path, dtype: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    least, furthest = BARS[dtype]
    write_checkpoint(tmp_path / "m3", M3_TINY, seed=0)
    expected = answers(tmp_path / "m3", "cpu", "float32")[0]
    for found in answers(tmp_path / "m3", "cuda", dtype):
        for names, ours, theirs in zip(ASKED, found, expected, strict=True):
            for name, own, wanted in zip(names or ("dense",), ours, theirs, strict=True):
                if name != "sparse":
                    assert cosines(own.held().values, wanted.held().values).min() >= least
                    continue
                weights, definition = weights_of(own), weights_of(wanted)
                every = weights.keys() | definition.keys()
                apart = [abs(weights.get(one, 0.0) - definition.get(one, 0.0)) for one in every]
                assert max(apart) <= furthest * max(definition.values())
