"""Engines: what runs one batch of tiles or of packed sequences."""
