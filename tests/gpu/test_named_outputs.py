"""BGE M3's outputs on the card, in batches that ask for several of them, beside the definition on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.engine.batch import PackedInput, pack
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.text import TorchTextEngine
from tessera.models import open_model
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import M3_TINY
from tests.models.running import cosines
from tests.models.xlm_roberta.test_m3 import NAMES, TEXTS, ids, weights_of
from tests.references.m3 import M3Reference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ASKED = [NAMES, ("sparse",), (), ("multivector", "dense")]
# Weights by how far they are from the definition's: the largest is near 1.
BARS = {"float32": (0.99999, 1e-4), "bfloat16": (0.998, 0.05)}


@pytest.mark.parametrize("dtype", BARS)
def test_outputs_of_one_pass(tmp_path: Path, dtype: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    least, furthest = BARS[dtype]
    write_checkpoint(tmp_path / "m3", M3_TINY, seed=0)
    model, reference = open_model(tmp_path / "m3"), M3Reference(tmp_path / "m3")
    settings = EngineSettings(max_batch_cost=4096, max_queue_cost=100_000)
    engine = TorchTextEngine(model, settings, Placement(device="cuda", dtype=dtype))
    engine.warm()
    tokens = [ids(model, text) for text in TEXTS]
    inputs = [
        PackedInput(tokens=each, positions=model.positions(each, ()), asked=names)
        for each, names in zip(tokens, ASKED, strict=True)
    ]
    # Twice, because the memory of the first batch is used again.
    for _ in range(2):
        answers = engine.launch_named(pack(inputs)).result()
        for names, each, answer in zip(ASKED, tokens, answers, strict=True):
            given = each.tolist()
            for name, rows in zip(names or ("dense",), answer.each(), strict=True):
                if name == "sparse":
                    found, expected = weights_of(rows), reference.weights(given)
                    every = sorted(found.keys() | expected.keys())
                    apart = [abs(found.get(one, 0.0) - expected.get(one, 0.0)) for one in every]
                    assert max(apart) <= furthest * max(1.0, *expected.values())
                    continue
                wanted = reference.dense(given)[None] if name == "dense" else reference.vectors(given)
                assert cosines(rows.held().values, np.asarray(wanted, np.float32)).min() >= least
    assert len(engine.launch(pack(inputs[2:3])).result()) == 1
    engine.close()
