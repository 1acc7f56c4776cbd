"""The reference for the checkpoint of ``tests/conftest.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.references.llama_nemotron_vl import Reference


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    from tests.references.llama_nemotron_vl import Reference

    return Reference(checkpoint)
