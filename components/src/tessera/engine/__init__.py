"""Engines: what runs one batch of tiles or of packed sequences."""

from tessera.engine.base import Cost, TextBatch, TextEngine, TextVectors, VisionEngine
from tessera.engine.launched import Launched

__all__ = ["Cost", "Launched", "TextBatch", "TextEngine", "TextVectors", "VisionEngine"]
