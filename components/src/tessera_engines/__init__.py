"""Engines that are built ahead of time: AOTInductor, TensorRT and TensorRT-LLM."""
