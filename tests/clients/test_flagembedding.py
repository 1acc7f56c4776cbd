"""bge-m3's outputs are those of FlagEmbedding, the package that defines them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera import Embedder
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import M3_TINY
from tests.clients.environment import clients_environment
from tests.e2e.service import ROOT

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.xdist_group("python")]

# Ids that come twice, an unknown sign, and one that is cut. Tokens of control in a text are not among them:
# they are text here, and FlagEmbedding's tokenizer obeys them.
TEXTS = [
    "the river under the bridge, the river",
    "été naïve 東京 the the ☃",
    "a market by the old temple",
    "x",
    "river " * 300,
]


def test_the_outputs_of_the_package_itself(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m3", M3_TINY, seed=7)
    # As the release has it: FlagEmbedding drops the token of that name.
    config = tmp_path / "m3" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "</s>"}))
    (packages,) = clients_environment("flagembedding").glob("lib/python*/site-packages")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.clients.flagembedding", str(tmp_path / "m3"), json.dumps(TEXTS)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    wanted: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    with Embedder(tmp_path / "m3", truncate="end") as embedder:
        found = embedder.embed(TEXTS, outputs=["dense", "sparse", "multivector"])
    np.testing.assert_allclose(found["dense"], wanted["dense_vecs"], atol=1e-5)
    for sparse, weights in zip(found["sparse"], wanted["lexical_weights"], strict=True):
        ids = sorted(map(int, weights))
        assert sparse.indices.tolist() == ids
        np.testing.assert_allclose(sparse.values, [weights[str(token)] for token in ids], atol=1e-5)
    for vectors, rows in zip(found["multivector"], wanted["colbert_vecs"], strict=True):
        np.testing.assert_allclose(vectors, rows, atol=1e-5)
