"""Engines: what runs one batch of tiles or of packed sequences."""

from tessera.engine.base import Cost, Launched, TextBatch, TextEngine, TextVectors, VisionEngine

__all__ = ["Cost", "Launched", "TextBatch", "TextEngine", "TextVectors", "VisionEngine"]
