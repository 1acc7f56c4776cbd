"""A kind of engine for text alone: the torch engine's vectors, each turned to its opposite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from tessera.engine.batch import TextBatch
from tessera.engine.kind import EngineKind
from tessera.engine.torch.text import TorchTextEngine
from tessera.launched import Launched
from tessera.rows import Rows


class MirrorTextEngine(TorchTextEngine):
    def launch(self, batch: TextBatch) -> Launched[Rows]:
        return super().launch(batch).map(lambda rows: replace(rows, values=-rows.values))


KIND: Final = EngineKind(
    make_text=MirrorTextEngine,
    rounding=lambda settings: "as in a mirror",
    configs=Path(__file__).parent / "configs",
)
