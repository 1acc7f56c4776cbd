"""Kernels for CUDA: in Triton, from the quack-kernels library, and as operators for compilers."""
