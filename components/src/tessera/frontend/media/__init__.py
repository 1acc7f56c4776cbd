"""Images that a request carries or names: obtained under one policy, checked, and never trusted."""

from __future__ import annotations

from tessera.frontend.media.embeddings import GRID, MAX_SIDE, LoadedEmbeddings
from tessera.frontend.media.loader import LoadedImage, MediaBudget, MediaLoader
from tessera.frontend.media.policy import ImageLimits, MediaPolicy

__all__ = [
    "GRID",
    "MAX_SIDE",
    "ImageLimits",
    "LoadedEmbeddings",
    "LoadedImage",
    "MediaBudget",
    "MediaLoader",
    "MediaPolicy",
]
