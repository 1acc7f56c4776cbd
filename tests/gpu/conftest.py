"""Everything here needs a CUDA device with a torch that carries Triton."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> LlamaNemotronVL:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return LlamaNemotronVL(checkpoint)
