"""Engines: each runs one batch of packed images or of packed sequences at a time."""
