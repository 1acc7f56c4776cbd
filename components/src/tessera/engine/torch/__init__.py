"""The engines that run a family's torch modules, on the CPU and on CUDA."""
