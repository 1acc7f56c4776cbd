"""Engines: each runs one batch of tiles or of packed sequences at a time."""
