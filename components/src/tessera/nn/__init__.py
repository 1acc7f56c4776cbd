"""Blocks that every model family is made of."""
