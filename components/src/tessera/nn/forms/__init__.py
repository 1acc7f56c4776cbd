"""How the operations of blocks run: plain, fused on CUDA, with products in FP8, or for a compiler."""
