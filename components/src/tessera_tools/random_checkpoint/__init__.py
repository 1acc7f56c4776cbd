"""Writes checkpoints with random weights in the real file layout."""
