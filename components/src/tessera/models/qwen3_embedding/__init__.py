"""Qwen3-Embedding: text alone, through a causal decoder, to the state of the last token."""
