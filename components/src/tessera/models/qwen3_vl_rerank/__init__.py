"""Qwen3-VL-Reranker: pairs of texts and images, judged by yes and no."""
