"""Building blocks that model families share, each with a plain torch form and a fused one for CUDA."""
