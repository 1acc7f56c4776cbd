"""Qwen3-Reranker: scores of pairs of texts by the logits of yes and no."""
