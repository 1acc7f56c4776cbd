"""CLIP: images by a vision transformer with a class token, texts by a causal one."""
