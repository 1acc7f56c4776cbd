"""Engines compiled ahead of time by PyTorch's AOTInductor: building and running."""
