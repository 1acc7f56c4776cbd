"""Tessera: a disaggregated service that turns text and images into vectors."""

__version__ = "0.1.0"
