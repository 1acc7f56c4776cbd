"""A worker without a text engine fails the texts that it is given, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.engine.base import TextEngine
from tessera.engine.batch import zeros
from tessera.engine.no_text import NoText
from tessera.errors import EngineFailed
from tests.families.dual_encoder import DualEncoder


def test_texts_fail() -> None:
    engine: TextEngine = NoText()
    engine.warm()
    for launch in (engine.launch, engine.launch_named):
        with pytest.raises(EngineFailed, match="encodes images alone"):
            launch(zeros(DualEncoder(Path(), 0), 8, 8))
    engine.close()
