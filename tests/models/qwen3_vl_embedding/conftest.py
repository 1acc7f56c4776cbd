from __future__ import annotations

from pathlib import Path

import pytest

from tessera.models.qwen3_vl_embedding.model import Options, Qwen3VLEmbedding
from tessera_tools.random_checkpoint.qwen3 import VL_TINY
from tests.models.conftest import WriteCheckpoint


@pytest.fixture(scope="session")
def path(written: WriteCheckpoint) -> Path:
    return written(VL_TINY)


@pytest.fixture(scope="session")
def model(path: Path) -> Qwen3VLEmbedding:
    return Qwen3VLEmbedding(path, Options())
