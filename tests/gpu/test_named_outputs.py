"""BGE M3's outputs on the card, in a batch that asks for several of them, beside float32 on a CPU.

The CPU is compared with itself, so that the tests run where there is no card.
"""

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
from tessera.models.base import CHUNKS
from tessera.rows import Rows
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import M3_TINY, TINY
from tests.models.running import cosines
from tests.models.xlm_roberta.test_m3 import NAMES, TEXTS, ids, weights_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ASKED = [NAMES, ("sparse",), (), ("multivector", "dense")]
# The worst cosine of vectors, and how far weights are apart beside the largest.
BARS = {"float32": (0.99999, 1e-4), "bfloat16": (0.998, 0.05)}
PLACES = [("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")]


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


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_outputs_of_one_pass(tmp_path: Path, device: str, dtype: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    least, furthest = BARS[dtype]
    write_checkpoint(tmp_path / "m3", M3_TINY, seed=0)
    expected = answers(tmp_path / "m3", "cpu", "float32")[0]
    for found in answers(tmp_path / "m3", device, dtype):
        for names, ours, theirs in zip(ASKED, found, expected, strict=True):
            for name, own, wanted in zip(names or ("dense",), ours, theirs, strict=True):
                if name != "sparse":
                    assert cosines(own.held().values, wanted.held().values).min() >= least
                    continue
                weights, definition = weights_of(own), weights_of(wanted)
                every = weights.keys() | definition.keys()
                apart = [abs(weights.get(one, 0.0) - definition.get(one, 0.0)) for one in every]
                assert max(apart) <= furthest * max(definition.values())


def chunk_answers(path: Path, device: str, dtype: str) -> list[np.ndarray]:
    """The rows of documents in chunks beside an input without, in one batch."""
    model = open_model(path)
    settings = EngineSettings(max_batch_cost=4096, max_queue_cost=100_000)
    engine = TorchTextEngine(model, settings, Placement(device=device, dtype=dtype))
    random = np.random.default_rng(0)
    inputs = []
    for size, bounds in ((300, (1, 17, 200, 299)), (40, ()), (9, (0, 4, 9)), (64, (3, 4))):
        tokens = random.integers(10, 2000, size, dtype=np.int32)
        chunks = np.array(bounds, np.int32)
        asked = (CHUNKS,) if bounds else ()
        positions = model.positions(tokens, ())
        inputs.append(PackedInput(tokens=tokens, positions=positions, asked=asked, chunks=chunks))
    found = [rows.values for rows in engine.launch_named(pack(inputs)).result()]
    engine.close()
    assert [len(rows) for rows in found] == [3, 1, 2, 1]
    return found


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_chunks_of_documents(tmp_path: Path, device: str, dtype: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    write_checkpoint(tmp_path / "bert", TINY, seed=0)
    expected = np.concatenate(chunk_answers(tmp_path / "bert", "cpu", "float32"))
    found = np.concatenate(chunk_answers(tmp_path / "bert", device, dtype))
    assert cosines(found, expected).min() >= BARS[dtype][0]
