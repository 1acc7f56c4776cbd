"""Qwen3-VL-Embedding: images of any size and texts in any order, to the state of the last token.

Opening, prompts, resizing and preprocessing live in modules that never import torch; ``loading`` and what
it builds do.
"""
