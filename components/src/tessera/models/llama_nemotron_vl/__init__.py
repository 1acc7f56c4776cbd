"""Llama Nemotron Embed VL: a SigLIP encoder, a pixel-shuffle projector and a bidirectional Llama.

Opening, prompts, tiling and preprocessing live in modules that never import torch; ``loading`` and what
it builds do.
"""
